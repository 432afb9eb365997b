"""Attentions that a model returns are eager's to old code, and no matrix until they are read."""

import copy
import pickle

import numpy as np
import pytest
import torch

import regard
import regard.hf
from models import model, padding, texts


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


def test_a_matrix_above_the_limit_is_refused():
    with torch.no_grad():
        first = model("llama")(texts(), output_attentions=True).attentions[0]
    with regard.limits(weights_bytes=1000), pytest.raises(regard.MaterializeError):
        first.mean()


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
