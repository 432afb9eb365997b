"""Muon: torch's optimizer of matrices, in float32."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from regard.lm.muon import Muon, orthogonal  # noqa: E402

SHAPES = [(6, 6), (24, 8), (8, 24)]


@pytest.mark.parametrize("shape", SHAPES)
def test_singular_values_become_about_one(shape):
    left, _, right = torch.linalg.svd(torch.randn(shape), full_matrices=False)
    made = orthogonal(left * torch.linspace(0.1, 1, len(right)) @ right)
    values = torch.linalg.svdvals(made)
    assert 0.6 < values.min()
    assert values.max() < 1.3
    turned = left.T @ made @ right.T
    assert (turned - torch.diag(turned.diag())).abs().max() < 1e-4  # it turns nothing


def test_a_matrix_of_zeros_stays_so():
    assert not orthogonal(torch.zeros(4, 3)).any()


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_its_steps_are_those_of_torch():
    start = [torch.randn(shape) for shape in SHAPES]
    ours, theirs = ([torch.nn.Parameter(one.clone()) for one in start] for _ in range(2))
    steps = [
        (ours, Muon(ours, 0.02, weight_decay=0.05)),
        (theirs, torch.optim.Muon(theirs, 0.02, weight_decay=0.05)),
    ]
    for seed in range(4):
        for parameters, optimizer in steps:
            random = torch.Generator().manual_seed(seed)
            for one in parameters:
                one.grad = torch.randn(one.shape, generator=random)
            optimizer.step()
    for own, other, old in zip(ours, theirs, start):
        moved = (other - old).norm().item()
        assert (own - other).norm().item() < 0.02 * moved  # what bfloat16 rounds
        assert moved > 0.05


def test_a_matrix_without_a_gradient_stays():
    one = torch.nn.Parameter(torch.ones(2, 2))
    Muon([one]).step()
    np.testing.assert_array_equal(one.detach().numpy(), 1)
