"""Documents in a worker: compiled once in its scheduler, linked into prompts there, named and found over HTTP."""
