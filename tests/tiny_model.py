"""A tiny language model with random weights: 2 layers of 4 heads, 300 tokens."""

import numpy as np

from regard.lm.config import Config, LayerConfig
from regard.lm.model import LanguageModel
from regard.lm.tokenizer import BytePairTokenizer

TEXT = "def run(self):\n    return self.value\n\nimport os\nimport sys\n" * 20


def tiny_model(name=""):
    tokenizer = BytePairTokenizer.train([TEXT], 300)
    layers = (LayerConfig(7, 10_000.0), LayerConfig(None, None))
    config = Config(len(tokenizer), 32, 4, 64, 32, layers)
    random = np.random.default_rng(0)
    weights = {
        key: random.normal(0, 0.3, shape).astype(np.float16).astype(np.float32)
        for key, shape in config.shapes().items()
    }
    return LanguageModel(config, tokenizer, weights, name)
