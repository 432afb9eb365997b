"""Models that the tests read: the one in the package, and a tiny one with random weights."""

import numpy as np
import pytest

from regard.lm.config import Config, LayerConfig
from regard.lm.model import LanguageModel
from regard.lm.tokenizer import BytePairTokenizer

TEXT = "def run(self):\n    return self.value\n\nimport os\nimport sys\n" * 20


@pytest.fixture(scope="session")
def builtin():
    return LanguageModel.load()


@pytest.fixture(scope="session")
def tiny():
    tokenizer = BytePairTokenizer.train([TEXT], 300)
    layers = (LayerConfig(7, 10_000.0), LayerConfig(None, None))
    config = Config(len(tokenizer), 32, 4, 64, 32, layers)
    random = np.random.default_rng(0)
    weights = {
        name: random.normal(0, 0.3, shape).astype(np.float16).astype(np.float32)
        for name, shape in config.shapes().items()
    }
    return LanguageModel(config, tokenizer, weights, name="tiny")
