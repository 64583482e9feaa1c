"""Documents on transformers models: methods over tasks, and what they cost."""
