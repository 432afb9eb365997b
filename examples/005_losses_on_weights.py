"""Three losses on attention weights that are never stored: entropy, guidance, and relations.

Usage: python examples/005_losses_on_weights.py [TOKENS]

With 8,192 tokens all three train within 60 MB above their inputs; one matrix would take 268 MB.
"""

import sys

import torch

import regard

tokens = int(sys.argv[1]) if len(sys.argv) > 1 else 96
heads, size = 2, 16
torch.manual_seed(0)
x = torch.randn(1, tokens, 32)


def project(*layers):
    """Each layer's heads: ``(1, heads, tokens, size)``."""
    return [layer(x).unflatten(-1, (heads, size)).transpose(1, 2) for layer in layers]


def train(name, loss_of, layers, steps=8, rate=0.05):
    """Adam on some projections; prints the loss before and after."""
    optimizer = torch.optim.Adam([p for layer in layers for p in layer.parameters()], lr=rate)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(*project(*layers))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"{name}: {losses[0]:.3f} before, less after {steps} steps:", losses[-1] < losses[0])


def linear():
    return torch.nn.Linear(32, heads * size)


# An entropy penalty: heads that look at many tokens alike are told to choose (Zhai et al. 2023).
def entropy_penalty(query, key):
    return regard.AttentionWeights(query, key, causal=True).entropy().mean()


# Guided attention, as for speech: weight far off the diagonal costs (Tachibana et al. 2018). Its
# sum over all pairs, a weight times a cost by distance, is a sum over the diagonals.
def guidance(query, key):
    distances, sums = regard.AttentionWeights(query, key).diagonals()
    cost = 1 - torch.exp(-((distances / tokens) ** 2) / (2 * 0.2**2))
    return (sums * cost).sum(-1).mean() / tokens


# MiniLM's relations: a student's queries are to attend as a teacher's do, by the cross entropy of
# the two (Wang et al. 2020): the student's log-sum-exp, less the mean of its scores by the
# teacher's weights, which is a product with the student's own vectors.
of_teacher = torch.randn(1, heads, tokens, size)


def relations(query, key):
    teacher = regard.AttentionWeights(of_teacher, of_teacher)
    mean_score = ((teacher @ key) * query).sum(-1) / size**0.5
    return (regard.AttentionWeights(query, key).lse - mean_score).mean()


train("entropy", entropy_penalty, [linear(), linear()])
train("guidance", guidance, [linear(), linear()])
train("relations", relations, [linear(), linear()])
