"""Language models to look into: tokenizers, and a decoder that runs in NumPy alone.

``regard.lm.training`` trains one; it needs torch.
"""

from regard.lm.model import LanguageModel
from regard.lm.tokenizer import BytePairTokenizer, WordTokenizer

__all__ = ["BytePairTokenizer", "LanguageModel", "WordTokenizer"]
