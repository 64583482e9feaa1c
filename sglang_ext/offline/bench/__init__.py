"""What a lift costs, phase by phase, against the same engine's native prefill and against its ceiling."""
