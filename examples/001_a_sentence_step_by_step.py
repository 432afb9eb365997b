"""From the dot product of two words to a trainable layer, on one sentence, in torch.

Usage: python examples/001_a_sentence_step_by_step.py
"""

import torch

import regard
from regard.nn import SelfAttention

words = ["Your", "journey", "starts", "with", "one", "step"]
vectors = torch.tensor(
    [
        [0.43, 0.15, 0.89],
        [0.55, 0.87, 0.66],
        [0.57, 0.85, 0.64],
        [0.22, 0.58, 0.33],
        [0.77, 0.25, 0.10],
        [0.05, 0.80, 0.55],
    ]
)


def show(title, numbers):
    """One number per word."""
    line = "  ".join(f"{word} {number:.4f}" for word, number in zip(words, numbers, strict=True))
    print(f"{title}: {line}")


# Without parameters: a score is the dot product of two word vectors, and nothing is scaled.
plain = regard.Steps.from_inputs(vectors, scale=1.0)
show("journey, scores ", plain.scores[1])
show("journey, weights", plain.weights[1])
print("journey, in context:", plain.output[1].numpy().round(4))

# With parameters: three projections tell what a word asks, what it offers and what it says.
torch.manual_seed(123)
w_query, w_key, w_value = torch.rand(3, 3, 2)  # three matrices, 3 numbers in and 2 out
trained = regard.Steps.from_inputs(vectors, w_query, w_key, w_value, tokens=words)
show("starts, weights ", trained.weights[2])
print("starts, in context: ", trained.output[2].numpy().round(4))

# Backward: the gradient of a loss by every step says which way each of its numbers would move.
wanted = vectors[:, :2]
gradients = trained.backward(trained.output - wanted)  # of half the squared distance
print(gradients.explain(2, 4))


def loss(*matrices):
    return float((regard.Steps.from_inputs(vectors, *matrices).output - wanted).square().sum() / 2)


matrices = w_query, w_key, w_value
slopes = gradients.d_w_query, gradients.d_w_key, gradients.d_w_value
after = loss(*(w - 0.2 * slope for w, slope in zip(matrices, slopes, strict=True)))
print(f"loss {loss(*matrices):.4f}, after one step of gradient descent {after:.4f}")

# The same as a layer, whose matrices a training run would change.
layer = SelfAttention.from_projections(w_query, w_key, w_value)
output, weights = layer(vectors, return_weights=True)
print("the layer agrees:", torch.allclose(output, trained.output))
query, key, weight = weights.strongest(1)
print(f"strongest link: {words[query[0, 0]]} to {words[key[0, 0]]}, {weight[0, 0]:.4f}")
