"""Cross-model maps: fitting, packs, the rank-disagreement score and the selection of positions."""
