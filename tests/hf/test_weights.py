"""Attentions that a model returns are eager's to old code, and no matrix until they are read."""

import copy
import pickle
import sys
import types

import numpy as np
import pytest
import torch

import regard
import regard.hf
from models import model, padding, texts
from regard.hf import _weights


@pytest.fixture(scope="module")
def attentions():
    """Those of eager, and those of regard, where rows are no padding."""
    found = {}
    for name in ("eager", "regard"):
        with torch.no_grad():
            found[name] = model("llama", name)(texts(), output_attentions=True).attentions
    return found


def test_old_code_uses_them_as_tensors(attentions):
    for compute in (
        lambda a: a[1][0, 2, 7],
        lambda a: a[0][:, 1, 3:5],
        lambda a: a[0][..., -1],
        lambda a: a[2].mean(),
        lambda a: torch.stack(a).sum(0),
        lambda a: torch.cat(list(a), 1),
        lambda a: a[0].squeeze(0)[0].max(),
        lambda a: a[0].permute(0, 2, 1, 3) @ torch.ones(20, 1),
        lambda a: torch.from_numpy(a[1].numpy()),
        lambda a: torch.tensor(a[1].tolist()),
        lambda a: torch.from_numpy(np.asarray(a[1])),
        lambda a: a[1][torch.tensor([1, 0])],
        lambda a: torch.stack([x for x in a[1]]),  # noqa: C416
        lambda a: a[1].detach().cpu().float().clone(),
        lambda a: copy.deepcopy(a[1]) + 0.0,
        lambda a: pickle.loads(pickle.dumps(a[1])) + 0.0,
        lambda a: a[1] * 2.0 + a[0],
        lambda a: torch.from_dlpack(a[1]),
        lambda a: torch.stack([layer.squeeze(0) for layer in a]),  # BertViz's format_attention
    ):
        eager, ours = compute(attentions["eager"]), compute(attentions["regard"])
        assert type(ours) is torch.Tensor
        torch.testing.assert_close(ours, eager, atol=1e-6, rtol=0)
    shapes = {name: [(x.shape, x.dtype, x.device) for x in a] for name, a in attentions.items()}
    assert shapes["eager"] == shapes["regard"]


@pytest.mark.parametrize("kind", ["gpt_oss", "granite_swa", "granitemoe_swa"])
def test_they_have_the_share_of_a_sink_where_eagers_have(kind):
    """Sinks take their share of gpt_oss's; of the others eager gives what they were before."""
    found = copy.deepcopy(model(kind))
    told = {}
    with torch.no_grad():
        for name, x in found.named_parameters():
            if name.endswith("sinks"):
                x.copy_(torch.linspace(-1, 2, len(x)))
        for name in ("eager", "regard"):
            found.set_attn_implementation(name)
            told[name] = found(texts(), attention_mask=padding(), output_attentions=True).attentions
    for eager, ours in zip(told["eager"], told["regard"]):
        assert (eager.sum(-1).max() < 0.99) == (kind == "gpt_oss")
        real = padding().bool()
        eager, ours = (x.transpose(1, 2)[real] for x in (eager, ours))
        torch.testing.assert_close(ours, eager, atol=1e-6, rtol=0)


def test_a_function_that_does_not_tell_about_sinks_leaves_them_their_share(monkeypatch):
    def needs_more(module, query, key, value, attention_mask, **kwargs):
        return value, module.temper * query

    file = types.ModuleType("a_file_of_a_model")
    monkeypatch.setitem(sys.modules, file.__name__, file)
    assert not _weights._are_before_sinks.__wrapped__(file.__name__)
    file.eager_attention_forward = needs_more
    assert not _weights._are_before_sinks.__wrapped__(file.__name__)


def test_a_model_that_gathers_them_by_itself_gets_them():
    """It tells nobody whether they are wanted: eager gives them in any case."""
    picture = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(2))
    for given in ({}, {"output_attentions": True}):
        told = {}
        for name in ("eager", "regard"):
            with torch.no_grad():
                found = model("bridgetower", name)(texts(), pixel_values=picture, **given)
            told[name] = [x for pair in found.attentions for x in pair]
        assert len(told["regard"]) == len(told["eager"]) == 4
        for eager, ours in zip(told["eager"], told["regard"]):
            assert isinstance(ours, regard.hf.Attentions)
            torch.testing.assert_close(ours + 0.0, eager, atol=1e-6, rtol=0)


@pytest.mark.parametrize("kind", ["llama", "granite_swa"])
def test_a_compiled_model_gives_them_as_tensors(kind):
    """No graph holds what is computed when it is read."""
    found = copy.deepcopy(model(kind))
    torch.compiler.reset()
    compiled = torch.compile(found, fullgraph=True, backend="eager")
    with torch.no_grad():
        # At the first time transformers installs hooks, under a lock that no graph holds.
        expected = found(texts(), output_attentions=True).attentions
        assert compiled(texts()).attentions is None
        told = compiled(texts(), output_attentions=True).attentions
    assert [type(x) for x in told] == [torch.Tensor] * 3
    for ours, plain in zip(told, expected):
        torch.testing.assert_close(ours, plain + 0.0, atol=1e-6, rtol=0)


def test_they_are_computed_when_they_are_read():
    with torch.no_grad():
        attentions = model("llama")(texts(), output_attentions=True).attentions
    first = attentions[0]
    assert isinstance(first, regard.hf.Attentions)
    assert isinstance(first.weights, regard.AttentionWeights)
    assert first._whole is None
    assert first[0, 1, 5].shape == (20,)
    assert first.weights.entropy().shape == (2, 4, 20)
    assert first._whole is None
    assert first.sum() == pytest.approx(2 * 4 * 20)
    assert first._whole is not None


def test_they_have_no_gradient_however_they_are_read():
    """The parameters of the model ask for one."""
    first = model("llama")(texts(), output_attentions=True).attentions[0]
    assert first.weights[0, 0].requires_grad
    assert not first.requires_grad
    for _ in range(2):  # before the whole is there, and after
        assert first[0, 0].numpy().shape == (20, 20)
        assert not first[torch.tensor([0])].requires_grad
        assert not first.numbers().requires_grad


def test_a_copy_has_what_was_written_into_them():
    with torch.no_grad():
        first = model("llama")(texts(), output_attentions=True).attentions[0]
    first[0, 1] = 0.0
    first *= 2.0
    for other in (copy.deepcopy(first), pickle.loads(pickle.dumps(first))):
        assert torch.equal(other + 0.0, first + 0.0)
        assert other[0, 1].abs().max() == 0.0
        assert other[1].sum() == pytest.approx(2 * 4 * 20)
        other += 1.0
        assert first[0, 1].abs().max() == 0.0


@pytest.mark.parametrize("is_read", [False, True])
def test_what_torch_saves_is_a_plain_tensor_and_a_copy_is_none(is_read, attentions, tmp_path):
    with torch.no_grad():
        told = model("llama")(texts(), output_attentions=True).attentions
    if is_read:
        told[0].sum()
    torch.save(told, tmp_path / "a.pt")
    found = torch.load(tmp_path / "a.pt", weights_only=True)
    assert [type(x) for x in found] == [torch.Tensor] * 3
    for ours, eager in zip(found, attentions["eager"]):
        torch.testing.assert_close(ours, eager, atol=1e-6, rtol=0)
    for copied in (copy.copy, copy.deepcopy):
        other = copied(told[1])
        assert isinstance(other, regard.hf.Attentions)
        assert other.weights.entropy().shape == (2, 4, 20)


def test_a_matrix_above_the_limit_is_refused():
    with torch.no_grad():
        first = model("llama")(texts(), output_attentions=True).attentions[0]
    with regard.limits(weights_bytes=1000), pytest.raises(regard.MaterializeError):
        first.mean()


def test_autocast_leaves_them_their_dtype():
    told = {}
    for name in ("eager", "regard"):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            told[name] = model("llama", name)(texts(), output_attentions=True).attentions[0]
    assert told["regard"].dtype == told["eager"].dtype == torch.float32
    torch.testing.assert_close(told["regard"] + 0.0, told["eager"], atol=4e-3, rtol=0)


def test_nobody_who_does_not_ask_gets_them():
    with torch.no_grad():
        assert model("llama")(texts()).attentions is None


def test_attentions_of_a_static_cache_say_that_it_was_written_over():
    found = model("llama")
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        steps = found.generate(
            texts(1), max_new_tokens=3, do_sample=False, cache_implementation="static",
            output_attentions=True, return_dict_in_generate=True,
        ).attentions  # fmt: skip
    with pytest.raises(RuntimeError, match="key was written to"):
        steps[0][0].mean()
    assert steps[-1][0].sum() == pytest.approx(4)


def test_in_inference_mode_they_hold_keys_of_their_own():
    found = model("llama")
    settings = {"max_new_tokens": 3, "do_sample": False, "output_attentions": True}
    settings |= {"return_dict_in_generate": True, "cache_implementation": "static"}
    with torch.inference_mode(), torch.compiler.set_stance("force_eager"):
        ids = texts()
        steps = found.generate(ids, attention_mask=padding(), **settings).attentions
        right = found(ids, attention_mask=padding(), output_attentions=True).attentions
    torch.testing.assert_close(steps[0][1][..., :20] + 0.0, right[1] + 0.0)
