"""Position-independent documents: compiled once by themselves, linked into any prompt at any position."""
