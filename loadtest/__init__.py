"""Load tests: what users feel when load rises, with and without the lift."""
