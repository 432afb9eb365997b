"""Edits of the weights: what they say, what they cut, what they cost, and where they are kept."""

import math
import pickle

import numpy as np
import pytest
import torch

import regard
from definition import define, visible_pairs
from plain_formula import to_array
from random_calls import edits as random_edits
from recordings import layer, numbers
from regard import AttentionWeights, Edit, Layer, Recording
from regard._call.checks import read_call
from regard._call.visible import Seen
from strategies import to_torch
from ways import DIFFERENTIABLE, by_ways

Hq, Lq, Lk = 4, 21, 33
QUERY, KEY, VALUE = (
    numbers(2, Hq, Lq, 8),
    numbers(2, 2, Lk, 8, seed=1),
    numbers(2, 2, Lk, 5, seed=2),
)
WIDE = [x.astype(np.float64) for x in (QUERY, KEY, VALUE)]
EDITS = [
    Edit(1, slice(4, 15), slice(3), 0.0),
    Edit(None, slice(-9, None), 7, 2.5),
    Edit(slice(2, None), -1, None, 0.1),
    Edit(heads=1, queries=slice(0, 9), keys=slice(1, 30), factor=3),
]


def close(found, exact, tolerance=2e-6):
    np.testing.assert_allclose(to_array(found), exact, rtol=0, atol=tolerance)


@by_ways()
def test_weights_are_multiplied_and_normalised_again(way):
    plain = define(*WIDE, causal=True)[1]
    factors = np.ones((Hq, Lq, Lk))
    factors[1, 4:15, :3] *= 0
    factors[:, -9:, 7] *= 2.5
    factors[2:, -1] *= 0.1
    factors[1, :9, 1:30] *= 3
    expected = plain * factors
    expected /= expected.sum(-1, keepdims=True)
    found = way.weights(QUERY, KEY, VALUE, causal=True, edits=EDITS)
    close(found, expected)
    close(way.output(QUERY, KEY, VALUE, causal=True, edits=EDITS), define(
        *WIDE, causal=True, edits=EDITS)[0])  # fmt: skip


@by_ways()
def test_a_knockout_is_a_mask_and_steering_is_a_bias(way):
    mask, bias = np.ones((Hq, Lq, Lk), bool), np.zeros((Hq, Lq, Lk), np.float32)
    mask[2, 3:8, 20:] = False
    bias[:, :, 5] = math.log(7)
    cut = [Edit(2, slice(3, 8), slice(20, None))]
    close(
        way.output(QUERY, KEY, VALUE, edits=cut, softcap=3.0),
        way.output(QUERY, KEY, VALUE, mask=mask, softcap=3.0),
    )
    steered = way.ask(QUERY, KEY, VALUE, edits=[Edit(keys=5, factor=7)], return_weights=True)
    biased = way.ask(QUERY, KEY, VALUE, bias=bias, return_weights=True)
    for mine, other in zip(steered, biased):
        close(np.asarray(mine), np.asarray(other))
    close(steered[1].lse, np.asarray(biased[1].lse))


@by_ways()
def test_a_query_whose_keys_are_all_cut_gives_zeros(way):
    edits = [Edit(0, 2, slice(10)), Edit(0, slice(1, 3), slice(10, None))]
    out, weights = way.ask(QUERY, KEY, VALUE, edits=edits, return_weights=True)
    assert (np.asarray(out)[:, 0, 2] == 0).all()
    assert (np.asarray(weights)[:, 0, 2] == 0).all()
    assert np.isneginf(np.asarray(weights.lse)[:, 0, 2]).all()
    sinks = np.full(Hq, 3, np.float32)
    assert (way.output(QUERY, KEY, VALUE, edits=edits, sinks=sinks)[:, 0, 2] == 0).all()


@by_ways()
def test_the_logit_of_a_sink_stays(way):
    sinks, edits = numbers(Hq, seed=4), [Edit(factor=0.25)]
    plain = define(*WIDE, sinks=sinks.astype(float))[1]
    rest = 1 - plain.sum(-1, keepdims=True)
    expected = 0.25 * plain / (0.25 * plain.sum(-1, keepdims=True) + rest)
    close(way.weights(QUERY, KEY, VALUE, sinks=sinks, edits=edits), expected)


@by_ways()
@pytest.mark.parametrize("every", [None, slice(None), slice(None, 9)])
def test_all_queries_of_a_part_are_also_those_at_negative_positions(way, every):
    arrays = QUERY[:, :, :9], KEY, VALUE
    part = {"query_start": -4, "key_start": 0}
    exact = define(*(x.astype(float) for x in arrays), edits=[Edit(keys=2)], query_start=-4)[0]
    close(way.output(*arrays, edits=[Edit(queries=every, keys=2)], **part), exact)


def test_ints_slices_and_all_say_the_same_rectangle():
    def output(*edit):
        return regard.attention(QUERY, KEY, VALUE, edits=[Edit(*edit, 0.5)])

    expected = output(slice(1, 2), slice(5, 6), slice(0, 33))
    for same in [
        (1, 5, None),
        (-3, -16, slice(None)),
        (np.int64(1), slice(5, 6, 1), slice(-33, None)),
    ]:
        np.testing.assert_array_equal(output(*same), expected)
    twice = regard.attention(QUERY, KEY, VALUE, edits=[Edit(1, 5, 3, 0.5), Edit(1, 5, 3, 0.5)])
    close(twice, regard.attention(QUERY, KEY, VALUE, edits=[Edit(1, 5, 3, 0.25)]))
    plain = regard.attention(QUERY, KEY, VALUE)
    for nothing in ([], (), [Edit(1, slice(3, 3))], [Edit(keys=slice(9, 4))]):
        np.testing.assert_array_equal(regard.attention(QUERY, KEY, VALUE, edits=nothing), plain)
    one = regard.attention(QUERY[0, 0], KEY[0, 0], VALUE[0, 0], edits=[Edit(0, 1, 2)])
    two = regard.attention(QUERY[0, :1], KEY[0, :1], VALUE[0, :1], edits=[Edit(-1, 1, 2)])
    np.testing.assert_array_equal(one, two[0])


@pytest.mark.parametrize("factor", [1e-320, 1e-30, 1e300])
@by_ways()
def test_factors_of_any_size(way, factor):
    edits = [Edit(keys=slice(9), factor=factor), Edit(1, None, slice(4, 20), factor)]
    for options in ({}, {"scale": 1e-31}, {"softcap": 2.0}):
        exact = define(*WIDE, edits=edits, **options)[0]
        close(way.output(QUERY, KEY, VALUE, edits=edits, **options), exact, 1e-4)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("backend", ["kernel", "torch"])
def test_what_is_cut_gets_no_gradient_and_spoils_none(backend, poison):
    edits = [Edit(queries=slice(0, 10), keys=slice(3, 6)), Edit(queries=slice(10, None), keys=4)]
    grads = []
    for at in (0.0, poison):
        q, k, v = (torch.from_numpy(x.copy()) for x in (QUERY, KEY, VALUE))
        k[:, :, 4], v[:, :, 4, 1] = at, at
        for x in (q, k, v):
            x.requires_grad_()
        out = regard.attention(q, k, v, edits=edits, backend=backend)
        grads.append(torch.autograd.grad(out.square().sum(), (q, k, v)))
    for clean, poisoned in zip(*grads):
        close(poisoned, clean.numpy(), 1e-5)
    assert (grads[1][1][:, :, 4] == 0).all()
    assert (grads[1][2][:, :, 4] == 0).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
@by_ways(*DIFFERENTIABLE)
def test_every_dtype(way, dtype):
    arrays = [torch.from_numpy(x).to(getattr(torch, dtype)) for x in (QUERY, KEY, VALUE)]
    exact = define(*(x.double().numpy() for x in arrays), edits=EDITS)[0]
    found = regard.attention(*arrays, edits=EDITS, backend=way.backend)
    assert found.dtype == arrays[0].dtype
    close(found.double(), exact, {"float16": 2e-3, "bfloat16": 2e-2, "float64": 1e-13}[dtype])


@by_ways()
def test_parts_of_the_weights_are_those_of_the_whole(way):
    weights = way.weights(QUERY, KEY, VALUE, edits=EDITS, causal=True)
    whole = np.asarray(weights)
    for rows, columns in [(slice(3, 19, 4), slice(2, None, 3)), (slice(9, None), slice(0, 5))]:
        close(weights.part(rows, columns), whole[:, :, rows, columns])
        part = weights.head(1).part(rows, columns)
        close(part.copy(), whole[:, 1, rows, columns])
        close(part.received(), whole[:, 1, rows, columns].sum(-2))
    close(weights[1, 2, 20], whole[1, 2, 20])
    close(weights[0, 1, 5:9:2, ::-3], whole[0, 1, 5:9:2, ::-3])
    pieces = weights.part(slice(4, 12)).matrix(1, 1)
    close(pieces, whole[1, 1, 4:12])


def test_the_picture_says_what_is_cut():
    edits = [Edit(1, slice(0, 9), slice(0, 10)), Edit(1, slice(0, 9), slice(10, 22))]
    picture = AttentionWeights(QUERY, KEY, edits=edits).pool((7, 3))
    assert np.isnan(picture[:, 1, :3, :2]).all()
    assert np.isfinite(picture[:, 1, :, 2]).all()
    assert np.isfinite(picture[:, [0, 2, 3]]).all()


def test_equal_edits_have_one_hash():
    one, same = (Edit(0, slice(0, 2), -1, factor) for factor in (2, 2.0))
    assert hash(one) == hash(same)
    assert {one: "here"}[same] == "here"
    assert len({one, Edit(0, slice(0, 3), -1, 2), Edit(0, slice(0, 2), -1)}) == 3


WRONG = {
    "one that is no list": (TypeError, Edit(keys=1), "edits is of type Edit; a list is needed"),
    "a tuple for an edit": (TypeError, [(0, 1, 2, 0.0)], r"edits\[0\] is of type tuple; a regard"),
    "a head too many": (ValueError, [Edit(4)], r"edits\[0\]: heads is 4; there are 4, -4 to 3"),
    "a query before the first": (ValueError, [Edit(), Edit(0, -22)], r"edits\[1\]: queries is -22"),
    "keys past the last": (
        ValueError,
        [Edit(keys=slice(3, 34))],
        r"keys is slice\(3, 34, None\); th",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_edits_that_do_not_fit_the_call(name):
    error, edits, message = WRONG[name]
    for function in (lambda: regard.attention(QUERY, KEY, VALUE, edits=edits),
                     lambda: AttentionWeights(QUERY, KEY, edits=edits)):  # fmt: skip
        with pytest.raises(error, match=message):
            function()


BAD_EDITS = {
    "a step": (ValueError, (0, slice(0, 9, 2)), r"queries is slice\(0, 9, 2\); its step must be 1"),
    "a list of keys": (
        TypeError,
        (0, 1, [2, 3]),
        "keys is a list; an int, a slice of ints, or None",
    ),
    "a float": (TypeError, (1.0,), "heads is a float; an int"),
    "a slice of floats": (TypeError, (slice(0.5, 2),), r"heads is slice\(0.5, 2, None\); an int"),
    "a bool": (TypeError, (True,), "heads is a bool; an int"),
    "below zero": (ValueError, (0, 1, 2, -0.5), "factor is -0.5; it must be at least 0 and finite"),
    "NaN": (ValueError, (0, 1, 2, math.nan), "factor is nan; it must be at least 0"),
    "infinity": (ValueError, (0, 1, 2, math.inf), "factor is inf; it must be at least 0"),
    "a word": (TypeError, (0, 1, 2, "0"), "factor is a str; a number is needed"),
}


@pytest.mark.parametrize("name", BAD_EDITS)
def test_an_edit_says_what_is_wrong_with_it(name):
    error, arguments, message = BAD_EDITS[name]
    with pytest.raises(error, match=f"^Edit: {message}"):
        Edit(*arguments)


def test_empty_calls():
    none = np.zeros((2, 0, 3, 8), np.float32)
    mask = np.ones((2, 0, 3, 3), bool)
    weights = AttentionWeights(none, none, mask=mask, edits=[Edit(None, keys=1)])
    assert weights.received("seen").shape == (2, 0, 3)
    for shape in ((0, 4, 3, 8), (2, 4, 0, 8)):
        q = np.zeros(shape, np.float32)
        assert regard.attention(q, q, q, edits=[Edit(1, slice(0, 0))]).shape == shape
    with pytest.raises(regard.ShapeError, match="keys is 0; there are 0"):
        regard.attention(QUERY, KEY[:, :, :0], VALUE[:, :, :0], edits=[Edit(keys=0)])


def test_a_layer_keeps_its_edits_in_a_file(tmp_path):
    found = layer(edits=[Edit(-1, slice(1, 3), 0), Edit(keys=-1, factor=0.5), Edit(1, slice(2, 2))])
    assert found.options["edits"] == (
        Edit(slice(3, 4), slice(1, 3), slice(0, 1)), Edit(keys=slice(3, 4), factor=0.5),
    )  # fmt: skip
    recording = Recording(["a", "b", "c", "d"], [found])
    recording.save(tmp_path / "r.safetensors")
    loaded = Recording.load(tmp_path / "r.safetensors")
    assert loaded.layers[0].options["edits"] == found.options["edits"]
    np.testing.assert_array_equal(loaded.weights[0][:], recording.weights[0][:])
    assert (recording.weights[0][3, 1:3, 0] == 0).all()
    for h in range(4):
        close(recording.steps(0, h).weights, recording.weights[0][h])
    assert len(found.head(0).options["edits"]) == 1


@pytest.mark.parametrize(
    "edits", ["[[0, 1, 2]]", "{}", "[[[0, 9], null, null, 0]]", "[[0.5, 0, 0, 1]]"]
)
def test_a_file_with_other_edits_is_refused(edits, tmp_path):
    path = tmp_path / "r.safetensors"
    whole = '"edits": [[null, null, [0, 1], 0.0]]'
    Recording(list("abcd"), [layer(edits=[Edit(keys=0)])]).save(path)
    text = path.read_bytes()
    escaped = whole.replace('"', '\\"').encode()
    assert escaped in text
    other = f'"edits": {edits}'.replace('"', '\\"').encode()
    path.write_bytes(text.replace(escaped, other + b" " * (len(escaped) - len(other))))
    with pytest.raises(regard.RecordingError, match=r"edits|heads"):
        Recording.load(path)


def test_weights_of_a_part_become_a_layer():
    weights = AttentionWeights(QUERY, KEY, edits=EDITS)
    part = weights.part(slice(5, 17)).head(1)
    kept = part.layer(1)
    close(AttentionWeights(kept.query, kept.key, **kept.options), np.asarray(part)[1:])
    assert np.array_equal(pickle.loads(pickle.dumps(part))[:], part[:])


class Edited(torch.nn.Module):
    """Causal attention with a cache, whose edits are of the keys of the whole text."""

    def forward(self, q, k, v):
        n = k.shape[2] - q.shape[2]
        edits = [Edit(1, None, slice(1, 3)), Edit(2, slice(max(0, 4 - n), None), 0, 3.0)]
        return regard.attention(q, k, v, causal=True, edits=edits)


def test_a_recording_of_a_model_has_its_edits():
    q, k, v = (torch.randn(1, 4, 9, 8) for _ in range(3))
    model = Edited()
    whole = regard.attention(
        q, k, v, causal=True, return_weights=True,
        edits=[Edit(1, None, slice(1, 3)), Edit(2, slice(4, None), 0, 3.0)],
    )[1]  # fmt: skip
    with regard.record() as recording:
        model(q, k, v)
    close(recording.weights[0], np.asarray(whole)[0])
    with regard.record(heads=[1, 2]) as recording:
        model(q, k, v)
    close(recording.weights[0], np.asarray(whole)[0, 1:3])
    with regard.record() as recording:
        for low, high in ((0, 6), (6, 7), (7, 9)):
            model(q[:, :, low:high], k[:, :, :high], v[:, :, :high])
    close(recording.weights[0], np.asarray(whole)[0])
    assert len(recording.layers[0].options["edits"]) == 2


def test_steps_write_the_edits_out():
    q, k, v = WIDE[0][0, :1, :3], WIDE[1][0, :1, :4], WIDE[2][0, :1, :4]
    found = regard.steps(q, k, v, edits=[Edit(0, 1, 2, 3.0), Edit(0, 2, slice(2))])
    np.testing.assert_allclose(found.masked[0, 1, 2], found.scaled[0, 1, 2] + math.log(3))
    assert np.isneginf(found.masked[0, 2, :2]).all()
    np.testing.assert_allclose(
        found.weights, np.exp(found.masked) / np.exp(found.masked).sum(-1)[..., None]
    )
    assert "scaled + ln(factor) of the edits, -inf where a query must not look: edits" in str(found)
    assert "+ 1.0986 of the edits =" in found.explain(1, 2, head=0)
    assert "query 2 does not attend to key 1" in found.explain(2, 1, head=0)
    scaled = regard.steps(q, k, v).scaled
    np.testing.assert_array_equal(found.scaled, scaled)


def test_heads_are_measured_with_their_edits():
    x = numbers(4, 20, 8)
    edits = [Edit(1, None, 0), Edit(2, None, slice(2, None), 1e-3)]
    edited = Recording(list("abcdefghij" * 2), [Layer(x, x, causal=True, edits=edits)]).heads()
    dense = np.asarray(AttentionWeights(x, x, causal=True, edits=edits))
    mask = np.ones((4, 20, 20), bool)
    mask[1, :, 0] = False
    masked = Recording(
        list("abcdefghij" * 2), [Layer(x, x, causal=True, mask=mask, edits=edits[1:])]
    ).heads()
    for name in ("entropy", "distance"):
        np.testing.assert_allclose(getattr(edited, name), getattr(masked, name), rtol=1e-5)
    np.testing.assert_allclose(edited.scores, masked.scores, rtol=1e-5)
    entropy = -(dense * np.log(np.where(dense > 0, dense, 1))).sum(-1).mean(-1)
    np.testing.assert_allclose(np.ravel(edited.entropy), entropy, rtol=1e-5)


@pytest.mark.parametrize("seed", range(40))
def test_keys_that_are_seen_are_counted(seed):
    rng = np.random.default_rng(seed)
    heads, rows, keys = (int(rng.integers(low, 9)) for low in (1, 1, 0))
    options = {"edits": random_edits(rng, heads, rows, keys)}
    options |= {"causal": True} if seed % 2 else {}
    options |= (
        {"segments": (rng.integers(0, 3, rows), rng.integers(0, 3, keys))} if seed < 10 else {}
    )
    options |= {"mask": rng.random((heads, rows, keys)) < 0.7} if seed > 30 else {}
    visible = visible_pairs(1, heads, rows, keys, **options)[0]
    seen = Seen(read_call(np.zeros((heads, rows, 2)), np.zeros((heads, keys, 2)), None, **options))
    np.testing.assert_array_equal(np.broadcast_to(seen.count, (heads, rows)), visible.sum(-1))
    sets = rng.random((3, keys)) < 0.5
    found = np.broadcast_to(seen.of(sets), (heads, rows, 3))
    np.testing.assert_array_equal(found, (visible[:, :, None] & sets).sum(-1))
    if keys:
        i, j = rng.integers(0, rows, 7), rng.integers(0, keys, 7)
        np.testing.assert_array_equal(
            np.broadcast_to(seen.pairs(i, j), (heads, 7)), visible[:, i, j]
        )


@pytest.mark.parametrize("threads", [1, 2])
def test_split_keys_and_decoding(threads, monkeypatch):
    q, k, v = numbers(1, 4, 3, 16), numbers(1, 1, 5000, 16, seed=1), numbers(1, 1, 5000, 7, seed=2)
    edits = [Edit(1, -1, slice(100, 4500)), Edit(None, 0, slice(2040, 2060), 9.0), Edit(keys=4999)]
    monkeypatch.setattr("regard._base.settings._num_threads", None)  # and back
    regard.set_num_threads(threads)
    v[0, 0, 4999] = np.nan
    wide = [x.astype(np.float64) for x in (q, k, v)]
    for rows in (1, 3):
        mine = [
            Edit(edit.heads, 0 if edit.queries == -1 and rows == 1 else edit.queries, edit.keys,
                 edit.factor)
            for edit in edits
        ]  # fmt: skip
        arrays = [q[:, :, :rows], k, v]
        exact = define(wide[0][:, :, :rows], *wide[1:], edits=mine)[0]
        close(regard.attention(*arrays, edits=mine), exact)
        given = [torch.from_numpy(x) for x in arrays]
        close(regard.attention(*given, **to_torch({"edits": mine})), exact)
