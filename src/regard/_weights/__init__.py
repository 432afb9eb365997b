"""AttentionWeights and their reductions."""
