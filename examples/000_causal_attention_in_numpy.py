"""Why attention divides by the root of the head size, and how a causal mask works, in NumPy.

Usage: python examples/000_causal_attention_in_numpy.py
"""

import numpy as np

import regard

# Four tokens. What a token looks for (query), what it can be found by (key) and what it passes on
# (value) are six numbers each.
rng = np.random.default_rng(0)
query, key, value = rng.standard_normal((3, 4, 6))
steps = regard.steps(query, key, value, causal=True)

# A dot product sums six products, and its variance grows with them. The softmax of such scores
# would nearly be a choice of one key. Dividing by sqrt(6) divides their variance by six again.
print(f"variance of the scores {steps.scores.var():.2f}, scaled {steps.scaled.var():.2f}")

# No token may look ahead: later keys get -inf, and exp(-inf) is a weight of exactly 0.
print("\nmasked\n", steps.masked.round(2))
print("\nweights\n", steps.weights.round(2))
print("\neach row of weights sums to", steps.weights.sum(-1).round(6))

# The operator computes the same output without storing any of that.
output, weights = regard.attention(query, key, value, causal=True, return_weights=True)
print("\nsame output:", np.allclose(output, steps.output))
print("what the last token attends to:", weights[3].round(2))

# A batch of eight texts with two heads is a matter of two more axes in front.
batch = rng.standard_normal((8, 2, 4, 6))
print("a batch:", regard.attention(batch, batch, batch, causal=True).shape)
