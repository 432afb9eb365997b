"""Models that the tests read: the one in the package, and a tiny one with random weights."""

import pytest

from regard.lm.model import LanguageModel
from tiny_model import tiny_model


@pytest.fixture(scope="session")
def builtin():
    return LanguageModel.load()


@pytest.fixture(scope="session")
def tiny():
    return tiny_model("tiny")
