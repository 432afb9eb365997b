"""A recording holds what a forward pass attended with, and gives back its weights."""

import copy

import numpy as np
import pytest
import torch

import regard
from recordings import TOKENS, layer, numbers, sample
from regard.recording import Layer, Recording


def test_weights_are_those_of_the_layer():
    recording = sample()
    assert len(recording.weights) == len(recording.layers) == 3
    for found, weights in zip(recording.layers, recording.weights):
        output = regard.attention(
            found.query, found.key, np.eye(4, dtype=np.float32)[None].repeat(found.key_heads, 0),
            **found.options,
        )  # fmt: skip
        np.testing.assert_allclose(weights[:], output, atol=1e-6)


def test_weights_are_made_once_and_counted_from_both_ends():
    recording = sample()
    assert recording.weights[2] is recording.weights[-1]
    with pytest.raises(IndexError, match=r"layer 3; there are 3, 0 to 2"):
        recording.weights[3]


def test_arrays_are_kept_as_they_come():
    q = numbers(2, 4, 8).swapaxes(0, 1)[:, :, ::2].swapaxes(0, 1)
    assert Layer(q, q).query is q
    tensor = torch.ones(1, 4, 2, dtype=torch.bfloat16, requires_grad=True)
    assert Recording(TOKENS, [Layer(tensor, tensor)]).layers[0].query is tensor


def test_queries_without_tokens_of_their_own_are_the_last_keys():
    assert Recording(TOKENS, [layer(Lq=2)]).query_tokens == (" starts", " with")
    assert Recording(TOKENS, [layer(Lq=2, query_start=1)]).query_tokens == (" journey", " starts")
    assert Recording(TOKENS, [layer(Lq=2, key_lengths=3)]).query_tokens == (" journey", " starts")
    assert Recording(TOKENS, [layer(key_lengths=3)]).query_tokens == tuple(TOKENS)


def test_queries_at_other_places_in_each_layer_need_tokens_of_their_own():
    for other in ({"query_start": 1}, {"key_lengths": 3}):
        both = [layer(Lq=2), layer(Lq=2, **other)]
        with pytest.raises(regard.ShapeError, match=r"layer 1 are from position 1 .* 0 from 2"):
            Recording(TOKENS, both)
        assert Recording(TOKENS, both, query_tokens=["x", "y"]).query_tokens == ("x", "y")


def test_texts_that_take_the_place_of_others_are_as_many():
    for name in ("tokens", "query_tokens"):
        recording = Recording(TOKENS, [layer()])
        with pytest.raises(regard.ShapeError, match=f"2 {name} in the place of {len(TOKENS)}"):
            setattr(recording, name, ("x", "y"))
        assert getattr(recording, name) == tuple(TOKENS)
        setattr(recording, name, [text.upper() for text in TOKENS])
        assert getattr(recording, name) == tuple(text.upper() for text in TOKENS)


@pytest.mark.parametrize(("queries", "place"), [(4, 0), (2, 2)])
def test_queries_that_are_tokens_follow_those_that_are_assigned(queries, place, tmp_path):
    recording = Recording(TOKENS, [layer(Lq=queries, causal=True)])
    recording.save(tmp_path / "a")
    for one in (recording, Recording.load(tmp_path / "a")):
        assert one.weights[0] is one.weights[0]  # made with the texts that there were
        one.tokens = list("abcd")
        assert one.query_tokens == tuple("abcd")[place:]
        origin = one.weights[0].head(0)._origin
        assert (origin.row_tokens, origin.column_tokens) == (one.query_tokens, one.tokens)


def test_weights_are_of_the_model_that_is_assigned(tmp_path):
    recording = Recording(TOKENS, [layer()], model="old")
    recording.save(tmp_path / "a")
    for one in (recording, Recording.load(tmp_path / "a"), copy.copy(recording)):
        assert one.weights[0]._origin.model == "old"
        one.model = "new"
        assert (one.model, one.weights[0]._origin.model) == ("new", "new")
        assert one.weights[0].head(0)._origin.model == "new"
        one.model = "old"
    with pytest.raises(TypeError, match="model is int; it must be a str"):
        Recording(TOKENS, [layer()], model=3)


def test_weights_are_of_the_name_and_options_that_are_assigned(tmp_path):
    own = layer(causal=True)
    recording = Recording(TOKENS, [own._with_statistics()])
    recording.save(tmp_path / "a")
    for one in (recording, Recording.load(tmp_path / "a"), copy.deepcopy(recording)):
        (found,) = one.layers
        assert one.weights[0] is one.weights[0]
        found.name = "attn"
        assert one.weights[0]._origin.name == "attn"
        found.head_numbers = (3, 5, 7, 9)
        assert one.weights[0].head(9).shape == (4, 4)
        found.options = found.options | {"scale": 2.0}
        expected = Layer(own.query, own.key, causal=True, scale=2.0)
        np.testing.assert_array_equal(
            one.weights[0][:], Recording(TOKENS, [expected]).weights[0][:]
        )
        assert one.weights[0] is one.weights[0]
        assert found.statistics is None, "they were those of another scale"


def test_options_that_cannot_be_are_not_assigned_to_a_layer(tmp_path):
    own = layer(causal=True)
    for change in (
        lambda x: x.__setitem__("causal", False),
        lambda x: x.__delitem__("causal"),
        lambda x: x.__ior__({"causal": False}),
        lambda x: x.update(causal=False),
        lambda x: x.pop("causal"),
        lambda x: x.clear(),
    ):
        for one in (own, copy.copy(own), copy.deepcopy(own), own._named("a", 1)):
            with pytest.raises(TypeError, match=r"one by one.* layer\.options = \{\*\*layer"):
                change(one.options)
    for wrong, error, message in (
        ({"scale": "x"}, TypeError, "scale is a str"),
        ({"rotary": 1}, TypeError, "no option 'rotary' to record"),
        ({"mask": np.ones(3, bool)}, regard.ShapeError, "mask"),
        ({"key_lengths": 5}, regard.ShapeError, "key_lengths are from 5 to 5"),
    ):
        with pytest.raises(error, match=message):
            own.options = wrong
    assert own.options == {"causal": True}


def test_queries_of_cross_attention_keep_their_texts():
    recording = Recording(TOKENS, [layer(Lq=2)], query_tokens=["x", "y"])
    recording.tokens = list("abcd")
    assert recording.query_tokens == ("x", "y")
    recording.query_tokens = ["u", "v"]
    assert recording.tokens == tuple("abcd")
    assert recording.weights[0]._origin.query_tokens == ("u", "v")


def test_cross_attention_has_query_tokens_of_its_own():
    recording = Recording(TOKENS, [layer(Lq=5)], query_tokens=list("abcde"))
    assert recording.query_tokens == tuple("abcde")
    with pytest.raises(regard.ShapeError, match=r"5 queries .* need query_tokens"):
        Recording(TOKENS, [layer(Lq=5)])
    with pytest.raises(regard.ShapeError, match="2 query_tokens, but 5 queries"):
        Recording(TOKENS, [layer(Lq=5)], query_tokens=["a", "b"])


def test_repr_tells_tokens_layers_heads_and_bytes():
    assert repr(Recording(TOKENS, [layer()], model="small")) == (
        "Recording(4 tokens, 1 layer, 4 heads, 672 B, model='small')"
    )
    two = Recording(TOKENS, [layer(), layer(Hq=2, D=500)])
    assert repr(two) == "Recording(4 tokens, 2 layers, 2 to 4 heads, 32.8 kB)"
    assert repr(layer(causal=True, sinks=numbers(4))) == (
        "Layer(query (4, 4, 6), key (2, 4, 6), value (2, 4, 3), causal=True, sinks)"
    )


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Recording([], [layer()]), regard.ShapeError, "no tokens; at least one"),
        (lambda: Recording(TOKENS, []), regard.ShapeError, "no layers; at least one"),
        (lambda: Recording("Your", [layer()]), TypeError, "tokens is one str; a list"),
        (lambda: Recording([1, 2, 3, 4], [layer()]), TypeError, r"tokens\[0\] is int; .*not ids"),
        (lambda: Recording(TOKENS, [1]), TypeError, r"layers\[0\] is int; every layer must be"),
        (lambda: Recording(TOKENS, layer()), TypeError, "layers is one Layer; a list is needed"),
        (lambda: Recording(TOKENS, [layer()], model=3), TypeError, "model is int; it must be"),
        (lambda: Recording(TOKENS, [layer()], boundary=4), ValueError, "boundary is 4; there"),
        (lambda: Recording(TOKENS, [layer()], boundary="a"), TypeError, "boundary is str; an int"),
        (
            lambda: Recording(TOKENS[:3], [layer()]),
            regard.ShapeError,
            r"3 tokens, but layer 0 has 4 keys; one token per key(.|\n)*key \(2, 4, 6\)",
        ),
        (
            lambda: Recording(TOKENS, [layer(), layer(Lq=2)]),
            regard.ShapeError,
            "layer 1 has 2 queries and layer 0 has 4; make one recording for each",
        ),
        (lambda: layer(Hq=3), regard.ShapeError, "3 query heads cannot share 2 key heads"),
        (lambda: layer(Hq=0, Hkv=0), regard.ShapeError, "at least one head"),
        (
            lambda: Layer(numbers(2, 1, 4, 3), numbers(2, 1, 4, 3)),
            regard.ShapeError,
            r"query \(2, 1, 4, 3\) is not read as \(H, L, D\)",
        ),
        (
            lambda: Layer(numbers(1, 4, 3), numbers(1, 4, 3), numbers(1, 5, 3)),
            regard.ShapeError,
            "4 keys and 5 values",
        ),
        (lambda: Layer([1.0], [1.0]), TypeError, "query is a builtins.list"),
        (lambda: layer(dtype=np.int64), TypeError, "query is int64; floating numbers"),
        (lambda: layer(temperature=1.0), TypeError, "no option 'temperature' to record; there are"),
        (lambda: layer(dropout=0.5), TypeError, "no option 'dropout' to record"),
        (lambda: layer(key_lengths=np.array([3, 4])), TypeError, "there is no batch"),
        (lambda: layer(key_lengths=5), regard.ShapeError, "key_lengths are from 5 to 5"),
        (lambda: layer(query_start=2**60), ValueError, r"query_start lies beyond 2\*\*53"),
        (lambda: layer(causal=1), TypeError, "causal is 1; True or False"),
        (lambda: layer(window=(1, True)), TypeError, "window is True; an int is needed"),
        (lambda: layer(scale=float("nan")), ValueError, "scale is nan; it must be finite"),
        (lambda: layer(segments=np.zeros((2, 4), int)), regard.ShapeError, "one number each"),
        (lambda: layer(mask=numbers(4, 4)), TypeError, "mask is float32; a mask is bool"),
        (lambda: Recording(None, [layer()]), TypeError, "tokens is a NoneType; a list with one"),
        (lambda: Recording(TOKENS, None), TypeError, "layers is a NoneType; a list of Layer is"),
        (lambda: Recording(TOKENS, [layer()], query_tokens=3), TypeError, "query_tokens is an int"),
    ],
)  # fmt: skip
def test_what_cannot_be_recorded_is_said(make, error, message):
    with pytest.raises(error, match=message):
        make()
