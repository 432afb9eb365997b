"""Tiny models of every architecture of transformers, their inputs, and what is done to them."""
