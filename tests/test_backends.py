"""A backend is one class and one line: a toy of a few lines serves everything."""

import numpy as np
import pytest

import regard
from recordings import numbers
from regard import _backends
from regard._backends import BACKENDS, Backend


class Toy:
    """The definition for one matrix after the other, and nothing but plain NumPy."""

    name = "toy"
    past_torch = False
    reads_statistics = True
    few_rows = 0
    checks_on_device = False
    wide_scores = False

    def refuses(self, call):
        if call.is_torch or call.causal:
            return "it knows arrays and no options"
        return None

    def _scores(self, call):
        group = call.sizes[1] // call.sizes[2]
        k = np.repeat(call.key, group, 1)
        return np.einsum("bhid,bhjd->bhij", call.query, k, dtype=float) * call.scale

    def attention(self, call, weights):
        w = np.exp(self._scores(call))
        v = np.repeat(call.value, call.sizes[1] // call.sizes[2], 1)
        out = (w / w.sum(-1, keepdims=True)) @ v
        return out.astype(call.query.dtype), None

    def row_statistics(self, call):
        s = self._scores(call)
        return s.max(-1), np.exp(s - s.max(-1, keepdims=True)).sum(-1)

    def score_unit(self, call):
        return 1.0

    def add_gradients(self, call, grad, delta, statistics, sums):
        raise NotImplementedError

    def finds_statistics(self, call, fields):
        return False

    def reduce(self, call, statistics, fields):
        maximum, total = (x[..., None] for x in statistics)
        w = np.exp(self._scores(call) - maximum) / total
        for name, out in fields.items():
            assert name in ("entropy", "weights", "received")
            if name == "entropy":
                out[...] = -(w * np.log(w)).sum(-1)
            elif name == "received":
                out[...] = w.sum(-2)
            else:
                out[...] = w


@pytest.fixture
def toy(monkeypatch):
    """The toy, before the others."""
    monkeypatch.setattr(_backends, "BACKENDS", (Toy(), *BACKENDS))


@pytest.mark.usefixtures("toy")
@pytest.mark.parametrize("backend", ["auto", "toy"])
def test_a_backend_comes_in_by_one_line(backend):
    q, k, v = numbers(2, 4, 9, 8), numbers(2, 2, 7, 8, seed=1), numbers(2, 2, 7, 5, seed=2)
    out, weights = regard.attention(q, k, v, return_weights=True, backend=backend)
    expected, others = regard.attention(q, k, v, return_weights=True, backend="kernel")
    assert weights._statistics.backend.name == "toy"
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(weights.entropy(), others.entropy(), rtol=1e-5)
    np.testing.assert_allclose(weights.received(), others.received(), rtol=1e-5)
    np.testing.assert_allclose(weights[...], others[...], rtol=1e-5)
    part = weights.part(slice(1, 8, 3), slice(2, 6)).head(3)
    np.testing.assert_allclose(np.asarray(part), others[:, 3, 1:8:3, 2:6], rtol=1e-5)


@pytest.mark.usefixtures("toy")
def test_what_it_refuses_goes_to_the_next_and_is_told():
    x = numbers(5, 4)
    out = regard.attention(x, x, x, causal=True)
    np.testing.assert_array_equal(out, regard.attention(x, x, x, causal=True, backend="kernel"))
    with pytest.raises(regard.UnsupportedError, match="toy: it knows arrays and no options"):
        regard.attention(x, x, x, causal=True, backend="toy")
    with pytest.raises(
        ValueError,
        match="'auto', 'toy', 'kernel', 'torch', 'fused', 'triton', 'reference' are known",
    ):
        regard.attention(x, x, x, backend="toi")


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_every_backend_has_all_of_it(backend):
    members = [name for name in vars(Backend) if not name.startswith("_")]
    assert {"attention", "reduce", "refuses", "row_statistics"} <= set(members)
    for name in members:
        assert hasattr(backend, name)


def test_the_reference_gives_weights_of_tensors_by_the_reference():
    import torch

    x = torch.from_numpy(numbers(2, 40, 8))
    _, weights = regard.attention(x, x, x, causal=True, return_weights=True, backend="reference")
    y = x.double().numpy()
    exact = np.asarray(regard.AttentionWeights(y, y, causal=True, backend="reference"))
    np.testing.assert_array_equal(weights[...].numpy(), exact.astype(np.float32))
