"""regard.watch on models of transformers."""

import numpy as np
import pytest
import torch

import regard
import regard.hf
from models import model, padding, texts


def trained(kind, implementation, inputs, **options):
    """The report of one step of a training with labels, which finds nothing wrong."""
    one = model(kind, implementation).train()
    try:
        with regard.watch(one, **options) as watch:
            one(**inputs).loss.backward()
    finally:
        one.eval()
        one.zero_grad()
    assert watch.nonfinite is None
    return watch.last


@pytest.mark.parametrize("kind", ["llama", "mistral", "gpt2"])
def test_a_decoder_is_the_same_with_regard_and_with_torchs_operator(kind):
    ids = texts()
    inputs = {"input_ids": ids, "attention_mask": padding(), "labels": ids}
    torch.manual_seed(0)
    ours = trained(kind, "regard", inputs)
    torch.manual_seed(0)
    theirs = trained(kind, "sdpa", inputs)
    assert ours.layers == theirs.layers
    assert ours["max_score"].shape == (3, 4)
    if kind != "gpt2":  # whose dropout is of other weights
        for name in ours:
            np.testing.assert_allclose(ours[name], theirs[name], rtol=2e-5, err_msg=name)


def test_padding_is_left_out():
    ids = texts(length=20)
    whole = trained("llama", "regard", {"input_ids": ids[1:], "labels": ids[1:]})
    ids[0, :5] = 7
    both = trained(
        "llama", "regard", {"input_ids": ids, "attention_mask": padding(), "labels": ids}
    )
    first = {"input_ids": ids[:1, 5:], "labels": ids[:1, 5:]}
    first["position_ids"] = torch.arange(5, 20)[None]
    part = trained("llama", "regard", first)
    rows = 14, 19  # that see two keys or more
    means = (rows[0] * part["distance"] + rows[1] * whole["distance"]) / sum(rows)
    np.testing.assert_allclose(both["distance"], means, rtol=1e-5)
    np.testing.assert_allclose(
        both["max_score"], np.maximum(part["max_score"], whole["max_score"]), rtol=1e-5
    )


def test_an_encoder_and_a_decoder_are_kinds():
    ids = texts()
    found = trained("bart", "regard", {"input_ids": ids, "labels": ids})
    assert {kind: len(names) for kind, names in found.layers.items()} == {
        "encoder": 2, "decoder": 2, "cross": 2,
    }  # fmt: skip
    assert found["cross/entropy_mean"].shape == (2, 4)
    assert np.isnan(found["cross/distance"]).all()


def test_eager_attention_is_not_seen_and_that_is_said():
    ids = texts()
    one, match = model("llama", "eager").train(), "no attention was measured.*set_attn_impl"
    with pytest.warns(UserWarning, match=match), regard.watch(one) as watch:
        one(input_ids=ids)
    one.eval()
    assert watch.last is None
