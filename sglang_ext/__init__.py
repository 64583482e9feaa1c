"""Everything that touches KV: the nouns, the maps between models, and the SGLang plugin."""
