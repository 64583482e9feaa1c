"""The plan executor for transformers models, and what is built on it: calibration and evaluation."""
