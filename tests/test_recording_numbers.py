"""Chosen layers and heads are found under their own numbers, and nothing else is given for them."""

import copy
import pickle

import numpy as np
import pytest
import torch

import regard
from recordings import TOKENS, assert_same, layer, numbers
from regard.recording import Grid, Layer, Recording

FEW = {"number": 5, "head_numbers": (3, 7), "name": "model.layers.5.self_attn"}


def chosen(Hkv=1, **options):
    """Layers 5 and 9 of a model, of each heads 3 and 7; their whole weights by place."""
    layers = [
        layer(2, Hkv, causal=True, **FEW, **options),
        layer(2, Hkv, causal=True, number=9, head_numbers=(3, 7), scale=0.1, **options),
    ]
    whole = [np.asarray(regard.AttentionWeights(x.query, x.key, **x.options)) for x in layers]
    return Recording(TOKENS, layers), whole


def test_a_layer_has_a_name_a_number_and_the_numbers_of_its_heads():
    found = layer(**{**FEW, "head_numbers": np.array([0, 1, 6, 7])})
    assert (found.name, found.number, found.head_numbers) == (FEW["name"], 5, (0, 1, 6, 7))
    assert all(type(number) is int for number in found.head_numbers)
    usual = layer()
    assert (usual.name, usual.number, usual.head_numbers) == ("", None, (0, 1, 2, 3))
    assert repr(layer(2, 2, 1, 1, 1, 1, **FEW)) == (
        "Layer(query (2, 1, 1), key (2, 1, 1), value (2, 1, 1), name='model.layers.5.self_attn',"
        " number=5, heads=(3, 7))"
    )


def test_a_head_of_a_layer_keeps_the_numbers():
    found = layer(4, 2, head_numbers=[2, 3, 8, 9], number=6, name="six", sinks=numbers(4))
    one = found.head(8)
    assert (one.name, one.number, one.head_numbers) == ("six", 6, (8,))
    np.testing.assert_array_equal(one.query[0], found.query[2])
    np.testing.assert_array_equal(one.key[0], found.key[1])
    np.testing.assert_array_equal(one.options["sinks"], found.options["sinks"][2:3])
    assert found.head(-1).head_numbers == (9,)
    assert one.head(8).head_numbers == (8,)
    with pytest.raises(IndexError, match="head 0 was not recorded; there are 2, 3, 8, 9"):
        found.head(0)
    assert layer().head(2).head_numbers == (2,)


@pytest.mark.parametrize("Hkv", [1, 2])
def test_layers_and_heads_are_found_under_their_numbers(Hkv):
    recording, (five, nine) = chosen(Hkv)
    assert recording.layer_numbers == (5, 9)
    assert recording.layers[0].number == 5
    np.testing.assert_array_equal(recording.weights[5][3, 2], five[0, 2])
    np.testing.assert_array_equal(recording.weights[9][7, 2], nine[1, 2])
    np.testing.assert_array_equal(recording.weights[9][-2, 1:3], nine[0, 1:3])
    assert recording.weights[-1] is recording.weights[9]
    assert recording.weights[-2] is recording.weights[5]
    steps = recording.steps(9, 7)
    np.testing.assert_allclose(steps.weights, nine[1], atol=1e-6)
    np.testing.assert_array_equal(recording.steps(-1, -1).weights, steps.weights)


def test_a_number_that_was_not_recorded_is_an_index_error_that_lists_the_others():
    recording, _ = chosen()
    for ask in (
        lambda: recording.weights[0],
        lambda: recording.steps(0, 3),
    ):
        with pytest.raises(IndexError, match="layer 0 was not recorded; there are 5, 9"):
            ask()
    with pytest.raises(IndexError, match="head 0 was not recorded; there are 3, 7"):
        recording.steps(5, 0)
    with pytest.raises(IndexError, match="layer -3 was not recorded"):
        recording.weights[-3]
    many = Recording(TOKENS, [layer(number=2 * n + 1) for n in range(40)])
    with pytest.raises(IndexError, match=r"layer 0 was .*1, 3, 5, .*15, \.\.\., 79\.$"):
        many.weights[0]


def test_weights_of_chosen_heads_never_give_another_head():
    recording, (five, _) = chosen()
    weights = recording.weights[5]
    assert weights.head_numbers == (3, 7)
    assert weights.shape == (2, 4, 4)
    assert repr(weights).startswith("AttentionWeights(2, 4, 4) float32 of heads 3, 7, computed")
    for every in (
        weights[:],
        weights[...],
        weights[:, :],
        np.asarray(weights),
        np.stack([*weights]),
    ):
        np.testing.assert_array_equal(every, five)
    np.testing.assert_array_equal(weights[7], five[1])
    np.testing.assert_array_equal(weights[..., 2], five[..., 2])
    np.testing.assert_array_equal(weights.head(7)[:], five[1])
    np.testing.assert_array_equal(weights.matrix(7)[1], five[1, 1])
    np.testing.assert_array_equal(weights.matrix()[:], five[0])
    for ask in (
        lambda: weights[0],
        lambda: weights[1, 2],
        lambda: weights.head(1),
        lambda: weights.matrix(0),
        lambda: weights.part(slice(2))[0],
        lambda: weights.copy()[0],
        lambda: pickle.loads(pickle.dumps(weights))[0],
        lambda: copy.deepcopy(weights).head(0),
        lambda: weights.layer().head(0),
        lambda: weights.head(7).layer().head(3),
        lambda: weights.plot(0),
    ):
        with pytest.raises(IndexError, match=r"head [013] was not recorded; there are"):
            ask()
    for part in (slice(0, 2), slice(3, None), slice(None, None, -1), slice(7, 8)):
        with pytest.raises(IndexError, match=r"slice of the heads 3, 7 .* weights\[3\]"):
            weights[part]
    with pytest.raises(IndexError, match="is a list; ints, slices"):
        weights[[3, 7]]


def test_parts_and_layers_of_weights_keep_the_heads_numbers():
    recording, (five, _) = chosen()
    weights = recording.weights[5]
    part = weights.part(slice(1, 3), slice(2))
    np.testing.assert_array_equal(part[7], five[1, 1:3, :2])
    assert weights.layer().head_numbers == (3, 7)
    assert weights.head(7).layer().head_numbers == (7,)
    np.testing.assert_array_equal(weights.matrix(7).layer().query[0], recording.layers[0].query[1])
    assert "weights[3]" in weights._repr_html_()
    assert "weights[0]" not in weights._repr_html_()


def test_tensors_are_indexed_by_number_too():
    x = torch.randn(2, 4, 3, generator=torch.manual_seed(0))
    weights = Recording(TOKENS, [Layer(x, x, head_numbers=(1, 4))]).weights[0]
    whole = regard.AttentionWeights(x, x)
    assert torch.equal(weights[4, 1], whole[1, 1])
    with pytest.raises(IndexError, match="head 0 was not recorded"):
        weights[0]


def test_usual_numbers_change_nothing():
    weights = Recording(TOKENS, [layer(number=0, head_numbers=range(4)), layer()]).weights
    assert weights[1].head_numbers == (0, 1, 2, 3)
    assert weights[0][1:3].shape == (2, 4, 4)
    assert "heads" not in repr(weights[0])
    with pytest.raises(IndexError, match="layer 2; there are 2, 0 to 1"):
        weights[2]
    with pytest.raises(IndexError, match="index 4 is out of range for axis 0"):
        weights[0][4]


def test_all_weights_come_in_order():
    recording, (five, nine) = chosen()
    for found, expected in zip(recording.weights, (five, nine)):
        np.testing.assert_array_equal(found[:], expected)
    assert [*reversed(recording.weights)] == [recording.weights[9], recording.weights[5]]
    assert recording.weights[5] in recording.weights
    assert five not in recording.weights
    assert len(recording.weights) == 2


def test_numbers_come_back_from_a_file(tmp_path):
    recording, (_, nine) = chosen()
    recording.save(tmp_path / "r")
    found = Recording.load(tmp_path / "r")
    assert_same(found, recording)
    assert found.layers[0].name == FEW["name"]
    np.testing.assert_array_equal(found.weights[9][7], nine[1])


GRID = Grid(1, 2, 3)


def test_a_picture_is_the_weights_of_a_query_on_its_patches():
    tokens = [str(n) for n in range(11)]
    found = layer(2, 1, Lq=4, Lk=11, number=5, head_numbers=(3, 7))
    recording = Recording(tokens, [found], grids=[GRID, (7, 4, 1)])
    assert recording.grids == (GRID, Grid(7, 4, 1))
    assert GRID.stop == 7
    row = recording.weights[5][7, 3]
    np.testing.assert_array_equal(recording.picture(5, 7, 3), row[1:7].reshape(2, 3))
    np.testing.assert_array_equal(recording.picture(-1, -1, -1), row[1:7].reshape(2, 3))
    at_the_end = recording.picture(5, 7, 3, grid=1)
    np.testing.assert_array_equal(at_the_end, row[7:].reshape(4, 1))
    np.testing.assert_array_equal(recording.picture(5, 7, 3, grid=-1), at_the_end)


def test_a_picture_of_tensors_is_a_tensor():
    x = torch.randn(1, 7, 3, generator=torch.manual_seed(0))
    recording = Recording([""] * 7, [Layer(x, x)], grids=[GRID])
    assert torch.equal(recording.picture(0, 0, 6), recording.weights[0][0, 6, 1:].reshape(2, 3))


def test_a_picture_reads_one_row(monkeypatch):
    x = numbers(1, 3000, 4)
    recording = Recording([""] * 3000, [Layer(x, x, causal=True)], grids=[(1000, 40, 50)])
    read = []
    backend = recording.weights[0]._statistics.backend
    reduce = type(backend).reduce
    monkeypatch.setattr(
        type(backend),
        "reduce",
        lambda self, call, *rest: read.append(call.sizes[3]) or reduce(self, call, *rest),
    )
    assert recording.picture(0, 0, -1).shape == (40, 50)
    assert sum(read) <= 2


def test_what_is_in_no_picture_is_an_index_error():
    recording = Recording(TOKENS, [layer()], grids=[(0, 1, 1)])
    with pytest.raises(IndexError, match=r"no picture; record one with grids=\[Grid"):
        Recording(TOKENS, [layer()]).picture(0, 0, 0)
    with pytest.raises(IndexError, match="grid 1; there are 1, 0 to 0"):
        recording.picture(0, 0, 0, grid=1)
    with pytest.raises(IndexError, match="token 4; there are 4, 0 to 3"):
        recording.picture(0, 0, 4)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: layer(name=None), TypeError, "name is NoneType; it must be a str"),
        (lambda: layer(number="5"), TypeError, "number is '5'; an int is needed"),
        (lambda: layer(number=True), TypeError, "number is True; an int is needed"),
        (lambda: layer(number=-1), ValueError, r"number is -1; a number from 0 to 2\*\*53"),
        (lambda: layer(number=2**60), ValueError, "number is 1152921504606846976; a number from"),
        (lambda: layer(head_numbers=3), TypeError, "head_numbers is 3; one int for each"),
        (lambda: layer(head_numbers="0123"), TypeError, "head_numbers is '0123'; one int"),
        (lambda: layer(head_numbers=[0, 1, 2, 2.5]), TypeError, "head_numbers is 2.5; an int"),
        (lambda: layer(head_numbers=[1, 2]), regard.ShapeError, "2 head_numbers for 4 query heads"),
        (lambda: layer(head_numbers=[1, 2, 3, 1]), ValueError, "are 1, 2, 3, 1; each head has"),
        (
            lambda: Recording(TOKENS, [layer(), layer(number=0)]),
            ValueError,
            r"layers\[0\] and layers\[1\] both have the number 0; each layer has its own",
        ),
        (
            lambda: Recording(TOKENS, [layer(number=7), layer(Lq=2, number=4)]),
            regard.ShapeError,
            "layer 4 has 2 queries and layer 7 has 4; make one recording for each",
        ),
        (lambda: Recording(TOKENS, [layer()], grids=[3]), TypeError, r"grids\[0\] is 3; a Grid\("),
        (lambda: Recording(TOKENS, [layer()], grids=3), TypeError, "grids is int; a list of Grid"),
        (lambda: Recording(TOKENS, [layer()], grids=(0, 2, 2)), TypeError, r"grids\[0\] is 0; a"),
        (lambda: Recording(TOKENS, [layer()], grids=[(0, 1, 1.5)]), TypeError, "of ints is needed"),
        (lambda: Recording(TOKENS, [layer()], grids=[(0, 1)]), TypeError, "of ints is needed"),
        (
            lambda: Recording(TOKENS, [layer()], grids=[(0, 2, 2), (2, 1, 3)]),
            ValueError,
            r"grids\[1\] is Grid\(start=2, rows=1, columns=3\), the tokens 2 to 4; there are 4",
        ),
        (lambda: Recording(TOKENS, [layer()], grids=[(-1, 1, 1)]), ValueError, "the tokens -1 to"),
        (lambda: Recording(TOKENS, [layer()], grids=[(0, 0, 3)]), ValueError, "at least one patch"),
        (
            lambda: Recording(TOKENS, [layer()], grids=[(2, 1, 2), (0, 1, 3)]),
            ValueError,
            r"Grid\(start=0.* ends before token 3, and Grid\(start=2.* begins at 2; a token is",
        ),
    ],
)  # fmt: skip
def test_numbers_and_grids_that_cannot_be_are_said(make, error, message):
    with pytest.raises(error, match=message):
        make()
