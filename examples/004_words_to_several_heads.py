"""Words to ids to vectors to heads: a small causal layer from end to end, in torch.

Usage: python examples/004_words_to_several_heads.py
"""

import torch
from torch import nn

from regard.lm import WordTokenizer
from regard.nn import MultiHeadAttention, SelfAttention

tokenizer = WordTokenizer("How are you doing ? I am good and you ? I am fine, thank you .")
sentence = "How are you doing ?"
ids = tokenizer.encode(sentence)
print(f"{len(tokenizer)} ids; {sentence!r} is {ids}; back: {tokenizer.decode(ids)!r}")
try:
    tokenizer.encode("How are they doing ?")
except ValueError as error:
    print(error)

torch.manual_seed(0)
embedding = nn.Embedding(len(tokenizer), 12)
x = embedding(torch.tensor([ids]))  # (1, 5, 12): one text, five words, twelve numbers

# One head: three linear projections, every word sees every word.
output, weights = SelfAttention(12, 12, bias=True)(x, return_weights=True)
print(
    "one head:", tuple(output.shape), "rows sum to", weights[0, 0].sum(-1).detach().numpy().round(4)
)

# Three heads of four numbers from one fused projection, causal, with both dropouts.
layer = MultiHeadAttention(12, 3, causal=True, dropout=0.1, residual_dropout=0.1)
print("training:", tuple(layer(x).shape), "two passes differ:", not torch.equal(layer(x), layer(x)))
layer.eval()
output, weights = layer(x, return_weights=True)
print("evaluation: two passes are equal:", torch.equal(layer(x), output))
for head in range(3):
    print(f"head {head}, 'you' attends to", weights[0, head, 2].detach().numpy().round(3))

# A text of 3,000 words in the same layer: nothing of size 3,000 x 3,000 is stored.
long = embedding(torch.randint(len(tokenizer), (1, 3000)))
with torch.no_grad():
    print("3,000 words:", tuple(layer(long).shape))
