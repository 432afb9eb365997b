"""Attention over a batch, the three roles of a vector, and what several heads are for, in torch.

Usage: python examples/002_batches_roles_and_heads.py
"""

import torch

import regard
from regard.nn import MultiHeadAttention

torch.manual_seed(0)
x = torch.randn(2, 5, 16)  # two texts, five tokens, sixteen numbers each: (B, L, D)

# At its plainest attention is two matrix products: all pairs of vectors, then weighted means.
pairs = torch.bmm(x, x.mT)
means = torch.bmm(torch.softmax(pairs, dim=-1), x)
print("two products:", torch.allclose(regard.attention(x, x, x, scale=1.0), means, atol=1e-6))

# Each vector plays three roles: it asks, it is found, and it is passed on. Three matrices let it be
# someone else in each; without them the asking and the finding are symmetric.
plain = regard.Steps.from_inputs(x[0])
asking, finding = torch.randn(2, 16, 16) / 4
roles = regard.Steps.from_inputs(x[0], asking, finding)
print("symmetric scores:", torch.allclose(plain.scores, plain.scores.T, atol=1e-6))
print("with roles:      ", torch.allclose(roles.scores, roles.scores.T, atol=1e-6))

# Long vectors have large products, and the softmax of large scores is all or nothing: its largest
# weight nears one and no gradient is left. Dividing by the root of the size keeps it open.
for size in (16, 1024):
    q, k = torch.randn(2, 200, size)
    raw = regard.AttentionWeights(q, k, scale=1.0).topk(1).values.mean()
    scaled = regard.AttentionWeights(q, k).topk(1).values.mean()
    print(f"{size:5} numbers: mean largest weight {raw:.2f}, scaled {scaled:.2f}")

# "Mary gave roses to Susan": one weight per pair of words cannot say both who gave and who got.
# Heads are separate attentions over slices of the vector, computed as one.
layer = MultiHeadAttention(embed_dim=16, num_heads=4)
output, weights = layer(x, return_weights=True)
print("output", tuple(output.shape), "weights", weights.shape)
