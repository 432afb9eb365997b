"""How every test runs."""

import pytest
import torch
from hypothesis import settings

# The same examples on every machine, and no deadline: a slow machine is no failure.
settings.load_profile("ci")


@pytest.fixture(autouse=True)
def same_random_numbers():
    """Whatever ran before, torch's generator starts every test from the same place."""
    torch.manual_seed(0)
