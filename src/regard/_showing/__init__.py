"""Displays of attention: the steps of a small one, and weights as a heatmap."""
