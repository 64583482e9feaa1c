"""`kvlift documents bench`: time to first token with documents that are compiled, against full prefill, over HTTP."""
