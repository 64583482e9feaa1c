PYTHON ?= $(shell command -v python3.11 || command -v python3)

.PHONY: demo test

demo: .venv/ready
	.venv/bin/kvlift demo

test: .venv/ready
	.venv/bin/python -m pytest

# Everything that both need, once: see tools/setup.py.
.venv/ready: pyproject.toml tools/setup.py
	$(PYTHON) tools/setup.py
