"""The same model in torch, from ``regard.nn``."""

import copy

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from callers import CALLERS  # noqa: E402
from regard.lm.config import Config, LayerConfig  # noqa: E402
from regard.lm.decoder import Decoder  # noqa: E402

TEXT = '''def entropy(weights):
    """Nats of each row of weights."""
    return -sum(w * math.log(w) for w in weights if w > 0)
'''


@pytest.mark.parametrize("copies", [1, 12])
def test_numpy_and_torch_give_the_same_numbers_to_1e_4(builtin, copies):
    decoder = Decoder.load("builtin")
    ids = builtin.tokenizer.encode(TEXT * copies, bos=True)
    logits = builtin.logits(builtin.hidden(ids))
    with torch.inference_mode():
        other = decoder(torch.tensor([ids, ids]))
    np.testing.assert_allclose(logits, other[0].numpy(), rtol=0, atol=1e-4)
    assert torch.equal(other[0], other[1])


def test_a_new_decoder_knows_nothing():
    config = Config(300, 32, 4, 64, 32, (LayerConfig(7, 10_000.0), LayerConfig()))
    logits = Decoder(config)(torch.arange(40)[None])
    loss = torch.nn.functional.cross_entropy(logits[0, :-1], torch.arange(1, 40))
    assert loss.item() == pytest.approx(np.log(300), abs=0.3)


def test_every_parameter_has_a_stored_name_and_a_gradient():
    config = Config(300, 32, 4, 64, 32, (LayerConfig(7, 10_000.0), LayerConfig()))
    decoder = Decoder(config)
    weights = decoder.weights()
    assert {name: tuple(w.shape) for name, w in weights.items()} == config.shapes()
    assert {id(w) for w in weights.values()} == {id(p) for p in decoder.parameters()}
    decoder(torch.arange(40)[None]).square().sum().backward()
    assert all(w.grad is not None for w in weights.values())


@pytest.fixture
def small():
    torch.manual_seed(1)
    decoder = Decoder(Config(300, 32, 4, 64, 32, (LayerConfig(7, 10_000.0), LayerConfig())))
    for weight in decoder.weights().values():
        torch.nn.init.normal_(weight, std=0.3)
    return decoder


@pytest.mark.parametrize("rows", [1, 9, 64])
def test_the_loss_and_its_gradients_are_those_of_the_logits(small, monkeypatch, rows):
    monkeypatch.setattr("regard.lm.decoder.ROWS_AT_ONCE", rows)
    ids = torch.randint(300, (2, 21))
    loss = 3 * small.loss(ids)
    loss.backward()
    own = {name: weight.grad.clone() for name, weight in small.weights().items()}
    small.zero_grad()
    logits = small(ids[:, :-1]).flatten(0, 1)
    plain = 3 * torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten())
    plain.backward()
    assert loss.item() == pytest.approx(plain.item(), rel=1e-6)
    for name, weight in small.weights().items():
        np.testing.assert_allclose(own[name], weight.grad, rtol=0, atol=2e-6, err_msg=name)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_decoder_of_another_dtype_has_a_loss_and_gradients_in_it(small, dtype):
    ids = torch.randint(300, (2, 21))
    decoder = copy.deepcopy(small).to(dtype)
    loss, wide = decoder.loss(ids), small.double().loss(ids)
    loss.backward()
    assert loss.dtype == torch.promote_types(dtype, torch.float32)
    assert loss.item() == pytest.approx(wide.item(), rel=4 * torch.finfo(dtype).eps)
    assert all(weight.grad.dtype == dtype for weight in decoder.weights().values())


def test_a_double_loss_has_the_gradients_of_its_differences(small):
    ids, weight = torch.randint(300, (1, 9)), small.double().embedding.weight
    small.loss(ids).backward()
    step = 1e-5 * torch.randn_like(weight)
    with torch.no_grad():
        weight += step
        rise = small.loss(ids)
        weight -= 2 * step
        fall = small.loss(ids)
    slope = (weight.grad * step).sum().item()
    assert (rise - fall).item() / 2 == pytest.approx(slope, rel=1e-6)


def test_the_loss_of_scores_far_apart_is_finite(small):
    with torch.no_grad():
        small.embedding.weight.mul_(1e4)
    loss = small.loss(torch.randint(300, (2, 21)))
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(small.embedding.weight.grad).all()


@pytest.mark.parametrize("caller", CALLERS.values(), ids=CALLERS)
def test_gradients_are_the_same_whatever_the_caller_computes_in(tiny, caller):
    plain = tiny.record("def f(x):", explain=-1)
    with caller():
        found = tiny.record("def f(x):", explain=-1)
    for one, other in zip(found.layers, plain.layers):
        assert one.gradient.dtype == np.float32
        np.testing.assert_array_equal(one.gradient, other.gradient)


def test_a_model_is_moved_to_torch_without_drawing_random_numbers(tiny):
    before = torch.get_rng_state()
    decoder = Decoder.of(tiny)
    tiny.record("def f(x):", explain=-1)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(weight.requires_grad for weight in decoder.parameters())
