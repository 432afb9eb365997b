"""Recordings with the gradients of a number by the output of each attention, and their effects."""

import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import regard
import regard.hf
from models import model, padding, texts
from recordings import assert_same, layer, numbers
from regard.recording import Layer, Recording, Writer
from tiny_model import TEXT, tiny_model

X = torch.randn(1, 10, 32, generator=torch.Generator().manual_seed(0))
LETTERS = list("abcdefghij")


class Attention(nn.Module):
    def __init__(self, ours):
        super().__init__()
        self.qkv, self.ours, self.kept = nn.Linear(32, 96), ours, None

    def forward(self, x):
        B, L, _ = x.shape
        q, k, v = self.qkv(x).view(B, L, 3, 4, -1).permute(2, 0, 3, 1, 4)
        if self.ours:
            out = regard.attention(q, k, v, causal=True)
        else:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        self.kept = out
        return out.transpose(1, 2).reshape(B, L, 32)


class Blocks(nn.Module):
    def __init__(self, ours=False):
        super().__init__()
        self.blocks = nn.ModuleList([Attention(ours) for _ in range(2)])

    def forward(self, x):
        for block in self.blocks:
            x = x + F.gelu(block(x))
        return x


def a_number(output):
    return (output**2)[0, 7].sum()


def right(found, x, number=a_number):
    """The gradients by autograd, with the outputs that the model itself kept."""
    loss = number(found(x))
    return torch.autograd.grad(loss, [block.kept for block in found.blocks])


@pytest.mark.parametrize("ours", [False, True], ids=["torch", "regard"])
def test_gradients_are_those_of_autograd_and_nothing_else_changes(ours):
    torch.manual_seed(0)
    found = Blocks(ours)
    plain, expected = found(X), right(found, X)
    with regard.record(tokens=LETTERS, explain=a_number) as recording:
        output = found(X)
    assert torch.equal(output, plain)
    for at, one in enumerate(recording.layers):
        torch.testing.assert_close(one.gradient, expected[at][0], atol=1e-6, rtol=1e-5)
        assert one.value is not None
        assert not one.gradient.requires_grad
    assert all(parameter.grad is None for parameter in found.parameters())
    output.sum().backward()  # the pass can still be trained on
    assert all(parameter.grad is not None for parameter in found.parameters())


@pytest.mark.parametrize("ours", [False, True], ids=["torch", "regard"])
def test_a_frozen_model_is_explained_and_may_write_into_outputs(ours):
    torch.manual_seed(0)
    found = Blocks(ours)
    expected = right(found, X)
    found.requires_grad_(False)
    for block in found.blocks:
        block.register_forward_hook(lambda module, args, output: output.mul_(1.0))
    with regard.record(explain=a_number) as recording:
        assert found(X).requires_grad
    for one, gradient in zip(recording.layers, expected):
        torch.testing.assert_close(one.gradient, gradient[0], atol=1e-6, rtol=1e-5)


class Checkpointed(Blocks):
    def forward(self, x, use_reentrant=False):
        for block in self.blocks:
            x = x + F.gelu(checkpoint(block, x, use_reentrant=use_reentrant))
        return x


def test_a_model_that_computes_again_in_the_backward_is_explained():
    torch.manual_seed(0)
    found = Checkpointed()
    expected = right(found, X, lambda output: a_number(Blocks.forward(found, X)))
    with regard.record(explain=a_number) as recording:
        found(X)
    for one, gradient in zip(recording.layers, expected):
        torch.testing.assert_close(one.gradient, gradient[0], atol=1e-6, rtol=1e-5)
    match = "give checkpoints use_reentrant=False"
    with pytest.raises(regard.RecordingError, match=match), regard.record(explain=a_number):
        found(X.clone().requires_grad_(), use_reentrant=True)


def test_chosen_layers_and_heads_of_a_batch_go_to_files(tmp_path):
    torch.manual_seed(0)
    found, x = Blocks(), torch.cat([X, X.flip(1)])
    _, expected = right(found, x, lambda output: output[:, 4].sum())
    path = tmp_path / "run.safetensors"
    with regard.record(
        layers=[1], heads=[1, 3], path=path, explain=lambda output: output[:, 4].sum()
    ) as recording:
        found(x)
    for b in range(2):
        one = Recording.load(tmp_path / f"run-{b}.safetensors")
        assert one.layers[0].head_numbers == (1, 3)
        np.testing.assert_allclose(one.layers[0].gradient, expected[b, [1, 3]], atol=1e-6)
        effects = one.effects(1, 3)
        np.testing.assert_allclose(effects, recording.batch[b].effects(1)[3], atol=1e-7)


@pytest.mark.parametrize("kind", ["llama", "gpt_oss", "bert"])
def test_models_of_transformers_are_explained_without_padding(kind):
    def number(output):
        return output[0][:, -3].sum(-1).pow(2).sum()

    found, mask = model(kind, "eager"), padding()
    before = found.config._attn_implementation
    with regard.hf.record(found, explain=number) as recording:
        found(texts(), attention_mask=mask)
    assert found.config._attn_implementation == before
    # A weight's derivative: eager's, of weights that are kept in its graph.
    output = found(texts(), attention_mask=mask, output_attentions=True)
    expected = torch.autograd.grad(number(output), output.attentions)
    for b, pad in enumerate((5, 0)):
        one = recording.batch[b]
        for number_ in one.layer_numbers:
            effects = one.effects(number_, kind="gradient")[...]
            weights = one.weights[number_][...]
            wanted = expected[number_][b, :, pad:, pad:]
            torch.testing.assert_close(
                effects[weights > 0], wanted[weights > 0], atol=1e-5, rtol=1e-4
            )


def test_an_encoder_and_a_decoder_are_explained_together():
    found, ids = model("bart"), texts()[:, :7]
    with regard.hf.record(found, explain=lambda output: output.logits[0, 3, 5]) as recording:
        found(input_ids=texts()[:1], decoder_input_ids=ids[:1])
    for group in recording.groups.values():
        assert all(one.gradient.abs().max() > 0 for one in group.layers)
        assert all(not one.gradient[:, 4:].any() for one in recording.layers)
    shapes = {name: group.effects(0).shape[1:] for name, group in recording.groups.items()}
    assert sorted(shapes.values()) == [(7, 7), (7, 20), (20, 20)]


def test_attention_that_the_number_does_not_depend_on_has_zeros():
    found = Blocks()
    with regard.record(explain=lambda output: output[0, 0].sum()) as recording:
        found(X)
    assert recording.layers[0].gradient[:, 0].abs().max() > 0
    assert not recording.layers[0].gradient[:, 1:].any()


def test_multihead_attention_of_torch_is_explained_unless_it_returns_weights():
    layer_ = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0)
    with regard.record(explain=a_number) as recording:
        layer_(X)
    assert recording.layers[0].gradient.shape == (4, 10, 8)
    attention = nn.MultiheadAttention(32, 4, batch_first=True)
    with (
        pytest.raises(regard.UnsupportedError, match="need_weights=False"),
        regard.record(explain=lambda output: output[0].sum()),
    ):
        attention(X, X, X)


def test_what_cannot_be_explained_is_told():
    found = Blocks()

    def run(explain, times=1):
        with regard.record(explain=explain):
            for _ in range(times):
                found(X)

    for error, call, text in [
        (TypeError, lambda: run("loss"), "explain is a str; a function"),
        (TypeError, lambda: run(lambda output: 3.0), "explain gave a float; a tensor"),
        (TypeError, lambda: run(lambda output: None), "explain gave a NoneType"),
        (regard.ShapeError, lambda: run(lambda output: output), r"shape \(1, 10, 32\); one number"),
        (regard.RecordingError, lambda: run(lambda o: o.detach().sum()), "does not depend on any"),
        (regard.RecordingError, lambda: run(lambda o: found.blocks[0].qkv.bias[0]), "not depend"),
        (regard.RecordingError, lambda: run(a_number, times=2), "explain is of one pass"),
    ]:
        with pytest.raises(error, match=text):
            call()
    with torch.no_grad(), pytest.raises(regard.RecordingError, match=r"leave out torch\.no_grad"):
        run(a_number)
    with (
        pytest.raises(regard.RecordingError, match="waits for the output of a model"),
        regard.record(explain=a_number),
    ):
        regard.attention(X, X, X)
    with regard.record() as recording:  # and none of it is left behind
        found(X)
    assert recording.layers[0].gradient is None


def explained(**given):
    return layer(causal=True, gradient=numbers(4, 4, 3, seed=9), **given)


def test_a_layer_has_a_gradient_of_the_shape_of_its_output():
    one = explained()
    assert "value (2, 4, 3), gradient, causal" in repr(one)
    assert one.nbytes == layer().nbytes + 4 * 4 * 3 * 4
    np.testing.assert_array_equal(one.head(3).gradient, one.gradient[3:])
    gradient = numbers(4, 4, 3)
    for error, given, text in [
        (regard.ShapeError, {"gradient": gradient[:2]}, r"\(Hq, Lq, Dv\) .* \(4, 4, 3\)"),
        (TypeError, {"gradient": gradient.astype(int)}, "gradient is int64"),
        (TypeError, {"gradient": torch.from_numpy(gradient)}, "both must be of one library"),
        (TypeError, {"gradient": "x"}, "gradient is a str"),
    ]:
        with pytest.raises(error, match=text):
            layer(**given)
    with pytest.raises(ValueError, match="a gradient without a value"):
        Layer(numbers(4, 4, 3), numbers(4, 4, 3), gradient=gradient)


def test_files_keep_gradients_and_say_so_by_their_version(tmp_path):
    recording = Recording(list("abcd"), [explained(), layer(), layer(dtype=np.float16)])
    others = {"x": Recording(list("abcd"), [explained(dtype=np.float16, Dv=3)])}
    groups = Recording(list("abcd"), [layer()], group="y", others=others)
    plain = Recording(list("abcd"), [layer()])
    for name, one, version in [("a", recording, 3), ("b", groups, 3), ("c", plain, 1)]:
        path = tmp_path / f"{name}.safetensors"
        one.save(path)
        assert f'"version":"{version}"'.encode() in path.read_bytes().replace(b" ", b"")
        assert_same(Recording.load(path), one)
        for own, found in zip(one.groups.values(), Recording.load(path).groups.values()):
            assert_same(found, own)
    with Writer(tmp_path / "w.safetensors") as writer:
        for one in recording.layers:
            writer.add(one)
        writer.finish({"": {"tokens": list("abcd")}})
    assert_same(Recording.load(tmp_path / "w.safetensors"), recording)


def test_a_recording_gives_the_effects_of_its_weights():
    one = explained(head_numbers=[1, 3, 5, 7], number=6)
    recording = Recording(list("abcd"), [one])
    right_ = recording.weights[6].effects(one.value, one.gradient)
    np.testing.assert_array_equal(recording.effects(6), right_)
    np.testing.assert_array_equal(recording.effects(-1, 5), right_[5])
    for kind in ("contribution", "relevance", "gradient"):
        found = recording.effects(6, 7, kind)
        wanted = recording.weights[6].effects(one.value, one.gradient, kind)[7]
        np.testing.assert_allclose(found, wanted, atol=1e-7)
        assert found.kind == kind
    plain = Recording(list("abcd"), [layer()])
    assert plain.effects(0, 2, "change").shape == (4, 4)
    bare = Recording(list("abcd"), [Layer(numbers(2, 4, 5), numbers(1, 4, 5))])
    for ask, text in [
        (lambda: plain.effects(0), "has no gradients; record the pass with explain="),
        (lambda: bare.effects(0), "has no values; record the pass with explain="),
        (lambda: bare.effects(0, kind="change"), "has no values; .* values=True"),
        (lambda: Recording.from_weights(["a"], np.ones((1, 1, 1, 1))).effects(0), "from_weights"),
    ]:
        with pytest.raises(regard.UnsupportedError, match=text):
            ask()
    with pytest.raises(IndexError, match="there are 6"):
        recording.effects(0)
    with pytest.raises(IndexError, match="there are 1, 3, 5, 7"):
        recording.effects(6, 0)
    with pytest.raises(ValueError, match="kind is 'x'"):
        recording.effects(6, kind="x")


def test_the_language_model_explains_the_loss_of_a_token():
    from regard.lm.decoder import Decoder

    lm, text = tiny_model(), TEXT[:60]
    plain = lm.record(text)
    ids, at = lm.tokenizer.encode(text, bos=True), 9
    recording = lm.record(text, explain=at)
    for one, other in zip(recording.layers, plain.layers):
        assert np.array_equal(one.query, other.query)
        assert np.array_equal(one.value, other.value)
        assert other.gradient is None
    decoder, tensor = Decoder.of(lm), torch.tensor(ids)
    with regard.record(explain=lambda o: F.cross_entropy(o[at - 1 : at], tensor[at : at + 1])) as r:
        decoder(tensor)
    for one, wanted in zip(recording.layers, r.layers):
        np.testing.assert_allclose(one.gradient, wanted.gradient, atol=1e-6)
        assert not one.gradient[:, at:].any()
        assert one.gradient[:, at - 1].any()
    last = lm.record(text, explain=-1).layers[0].gradient
    np.testing.assert_array_equal(last, lm.record(text, explain=len(ids) - 1).layers[0].gradient)
    for position in (0, len(ids), -len(ids)):
        with pytest.raises(IndexError, match=f"a position from 1 to {len(ids) - 1} is needed"):
            lm.record(text, explain=position)
    with pytest.raises(TypeError):
        lm.record(text, explain=1.5)


def test_explaining_without_torch_names_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "regard.lm.decoder", raising=False)
    with pytest.raises(ModuleNotFoundError, match=r"regard\[torch\]"):
        tiny_model().record("import os", explain=1)
