PYTHON ?= $(shell command -v python3.11 || command -v python3)
CORES = $(shell nproc)
TINY = sglang_ext/offline/family/models

.PHONY: demo test evaluate bench loadtest documents

demo: .venv/ready
	.venv/bin/kvlift demo

test: .venv/ready
	.venv/bin/python -m pytest

# The tiny family's whole table: results/evaluate.json and plots. Small models are fastest on one thread.
evaluate: .venv/ready
	OMP_NUM_THREADS=1 .venv/bin/kvlift evaluate --preset family

# Native prefill against the lift: results/bench.json and plots.
bench: .venv/ready
	.venv/bin/kvlift bench prefill --preset two-cores --threads $(CORES)

# Saturation and a short sweep on the load pair: results/loadtest/. The whole protocol: make loadtest FULL=--full
loadtest: .venv/ready
	.venv/bin/kvlift loadtest all results/loadtest $(FULL)

# Everything that they need, once: see tools/setup.py.
.venv/ready: pyproject.toml tools/setup.py
	$(PYTHON) tools/setup.py

# A tiny Writer trained anew, then every method with the committed adapters: results/documents.json and plots.
documents: .venv/ready
	OMP_NUM_THREADS=1 .venv/bin/kvlift documents train --model $(TINY)/kvlift-tiny-documents --data tiny:1023 \
		--dtype float32 --no-checkpointing --batch 8 --out results/documents/sempic-0
	OMP_NUM_THREADS=1 .venv/bin/kvlift documents evaluate --preset tiny --out results
