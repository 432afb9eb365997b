"""Algorithm 3 of "Formal Algorithms for Transformers": one token attends to its context, in NumPy.

Usage: python examples/003_one_token_and_its_context.py
"""

import numpy as np

import regard

# The current token has 4 numbers, as have the three context tokens. They meet as queries and keys
# of 3 numbers; what comes out has 2. No size needs to equal another.
d_in, d_attn, d_out = 4, 3, 2
rng = np.random.default_rng(0)
current, context = rng.standard_normal(d_in), rng.standard_normal((3, d_in))
steps = regard.Steps.from_inputs(
    current,
    rng.standard_normal((d_in, d_attn)),
    rng.standard_normal((d_in, d_attn)),
    rng.standard_normal((d_in, d_out)),
    b_query=rng.standard_normal(d_attn),
    b_key=rng.standard_normal(d_attn),
    b_value=rng.standard_normal(d_out),
    context=context,
)
for name in ("query", "key", "value", "scores", "weights", "output"):
    print(f"{name:8}", getattr(steps, name).shape)
print("weights", steps.weights.round(4), "sum", steps.weights.sum().round(6))

# Scores of any size give exact weights: exp(48699) is no float, but only differences matter.
row = np.arange(1.0, 11.0)[:, None] * np.ones(10)
large = regard.Steps.from_inputs(
    np.ones(10), row.T, row.T, row.T, context=np.array([[2.0], [3.0], [4.0]]) * np.ones(10)
)
print("scaled scores", large.scaled.round(2))
print("weights      ", large.weights)
print("output       ", large.output)

# Dividing the scores by their sum, without the exponential, is no softmax: it shifts with the
# scores, and a negative score would be a negative weight.
print("by the sum   ", (large.scaled / large.scaled.sum()).round(4))
