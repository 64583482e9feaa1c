"""`kvlift evaluate`: target alone, source alone, and lifted by selector and budget, over a dataset."""
