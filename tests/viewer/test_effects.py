"""Effects in the viewer: what the server answers, the page shows, and an exported page computes."""

import json
from urllib.parse import urlencode

import numpy as np
import pytest
import torch

from definition import define, visible_pairs
from regard import Edit
from regard.recording import Layer, Recording
from regard.viewer import _effects
from regard.viewer.answer import Answers

KINDS = ("knockout", "contribution", "relevance", "gradient", "change")
SIDE = 256


def numbers(*shape, seed):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def explained(Lq=45, Lk=None, heads=4, key_heads=2, size=6, seed=0, **options):
    """A layer with values and a gradient; each row's gradient is of another size."""
    Lk = Lk or Lq
    sizes = np.exp(np.random.default_rng(seed).standard_normal((1, Lq, 1))).astype(np.float32)
    return Layer(
        1.5 * numbers(heads, Lq, size, seed=seed + 1),
        1.5 * numbers(key_heads, Lk, size, seed=seed + 2),
        numbers(key_heads, Lk, 3, seed=seed + 3),
        gradient=0.1 * sizes * numbers(heads, Lq, 3, seed=seed + 4), **options,
    )  # fmt: skip


def of(*layers, **more):
    return Recording([f" t{n}" for n in range(layers[0].key.shape[1])], layers, **more)


def dense(found, head, kind="knockout"):
    """``(Lq, Lk)`` float64 of the plain formulas, 1 − w as the sum of the others; NaN is masked."""
    one = found.head(found.head_numbers[head])
    q, k, v, g = (np.asarray(x, float)[None] for x in (one.query, one.key, one.value, one.gradient))
    options = {name: x for name, x in one.options.items() if name in SHOWN}
    visible = visible_pairs(1, 1, q.shape[2], k.shape[2], **options)[0, 0]
    w = define(q, k, **one.options)[0][0, 0]
    v, g = v[0, 0], g[0, 0]
    gv, first = g @ v.T, w == w.max(1, keepdims=True)
    small = np.where(first, 0, w)  # a row without its largest weight, whose 1 − w may be tiny
    of_sink = np.where(visible.any(1), 1 - w.sum(1), 0)[:, None] if "sinks" in one.options else 0
    rest = np.where(first, small.sum(1, keepdims=True) + of_sink, 1 - w)
    rest = np.where(rest < 1e-300, np.inf, rest)  # the output is 0 then
    output = (w @ v)[:, None] - w[..., None] * v
    left = np.where(first[..., None], (small @ v)[:, None], output) / rest[..., None]
    values = {
        "knockout": w * ((g[:, None] * left).sum(-1) - gv),
        "contribution": w * gv,
        "relevance": np.maximum(w * gv, 0),
        "gradient": gv,
        "change": w * np.linalg.norm(left - v, axis=-1),
    }
    return np.where(visible, values[kind], np.nan)


def binned(x, side):
    """The number of largest size in bins of ``side`` × ``side``; NaN where all is masked."""
    rows, columns = (-(-n // side) for n in x.shape)
    padded = np.full((rows * side, columns * side), np.nan)
    padded[: x.shape[0], : x.shape[1]] = x
    bins = padded.reshape(rows, side, columns, side).swapaxes(1, 2).reshape(rows, columns, -1)
    at = np.nan_to_num(abs(bins), nan=-1).argmax(-1)
    return np.take_along_axis(bins, at[..., None], -1)[..., 0]


def mean(*matrices):
    """What some heads have on average; a pair that some mask counts as 0 there."""
    found = np.array(matrices)
    return np.where(np.isnan(found).all(0), np.nan, np.nan_to_num(found).mean(0))


def strongest(x, n, rows=slice(None), columns=slice(None)):
    """``[(query, key, number), …]``, largest in size first."""
    part = np.nan_to_num(x[rows, columns])
    flat = np.argsort(-abs(part).reshape(-1), kind="stable")[:n]
    top, left = rows.start or 0, columns.start or 0
    return [(i + top, j + left, part[i, j]) for i, j in zip(*np.unravel_index(flat, part.shape))]


def asked(answers, path, **parameters):
    answer = answers.answer(path, urlencode(parameters))
    assert answer.status == 200, answer.body
    return answer


def floats(answers, path, **parameters):
    """The float32 of a response, once it has read all rows."""
    while (answer := asked(answers, path, **parameters)).coverage < 1:
        pass
    return np.frombuffer(answer.body, "<f4")


def whole(answers, rows, columns, level, **parameters):
    """All tiles of a level, as one picture."""
    side = SIDE << level
    down, across = (range(-(-n // side)) for n in (rows, columns))
    tiles = [
        [
            floats(
                answers, "tile", level=level, row=r, column=c, plane="max", **parameters
            ).reshape(SIDE, SIDE)
            for c in across
        ]
        for r in down
    ]
    return np.block(tiles)[: -(-rows >> level), : -(-columns >> level)]


def close(found, exact, layer, kind="knockout"):
    """Within what float32 gives of the largest product of a value and a gradient."""
    sizes = (
        np.linalg.norm(np.asarray(x, float), axis=-1).max() for x in (layer.value, layer.gradient)
    )
    scale = np.prod(list(sizes)) if kind != "change" else np.linalg.norm(layer.value, axis=-1).max()
    np.testing.assert_allclose(found, exact, rtol=0, atol=2e-6 * scale)


L = 45
NO_LAST = np.ones((L, L), bool)
NO_LAST[5] = False  # a query that sees nothing
NO_LAST[:, 30] = False
SHOWN = ("causal", "window", "mask", "key_lengths", "segments", "intervals", "query_start", "edits")
RECORDINGS = {
    "causal": of(explained(causal=True)),
    "one token": of(explained(1, causal=True)),
    "later queries": of(explained(9, L, causal=True)),
    "cross": of(explained(L, 11), query_tokens=[f"q{n}" for n in range(L)]),
    "sinks": of(explained(causal=True, window=(4, 0), sinks=numbers(4, seed=4))),
    "mask": of(explained(mask=NO_LAST)),
    "mask of heads": of(explained(mask=numbers(4, 1, L, seed=5) > 0)),
    "edits": of(explained(causal=True, edits=[Edit(None, slice(9, None), 5, 4.0), Edit(3, 30)])),
    "all at once": of(
        explained(
            causal=True, window=(9, 0), softcap=4.0, scale=0.9, key_lengths=37, query_start=0,
            segments=np.arange(L) // 20, sinks=numbers(4, seed=8), bias=numbers(1, L, L, seed=7),
        )
    ),
    "near 1": of(explained(size=40, causal=True)),
    "several tiles": of(explained(300, heads=2, causal=True)),
}  # fmt: skip


@pytest.mark.parametrize("name", RECORDINGS)
def test_every_number_is_that_of_the_dense_formula(name):
    recording = RECORDINGS[name]
    (layer,), answers = recording.layers, Answers([recording])
    Lq, Lk, last = layer.query.shape[1], layer.key.shape[1], layer.heads - 1
    for kind in KINDS:
        exact, head = dense(layer, last, kind), {"layer": 0, "head": last, "effect": kind}
        for level in {0, 1, 3, max(Lq, Lk).bit_length()}:
            close(whole(answers, Lq, Lk, level, **head), binned(exact, 1 << level), layer, kind)
        close(floats(answers, "row", query=Lq // 2, **head), exact[Lq // 2], layer, kind)
        close(floats(answers, "column", key=Lk // 3, **head), exact[:, Lk // 3], layer, kind)
        pair = floats(answers, "pair", query=Lq - 1, key=Lk - 1, effect=kind)
        close(pair[last], exact[Lq - 1, Lk - 1], layer, kind)
        links = json.loads(asked(answers, "links", n=5, **head).body)
        assert links["fewest"] == 0
        found = [(i, j, exact[i, j]) for i, j, _ in links["links"]]
        close([x for *_, x in links["links"]], [x for *_, x in found], layer, kind)
        best = [abs(x) for *_, x in strongest(exact, 5) if x]
        close([abs(x) for *_, x in found][: len(best)], best[: len(found)], layer, kind)
        assert len(found) <= len(best)
    answers.close()


def test_several_heads_and_queries_are_their_means():
    (layer,), answers = RECORDINGS["mask of heads"].layers, Answers([RECORDINGS["mask of heads"]])
    exact = mean(dense(layer, 1), dense(layer, 3))
    heads = {"layer": 0, "heads": "3,1", "effect": "knockout"}
    close(whole(answers, L, L, 2, **heads), binned(exact, 4), layer)
    close(floats(answers, "column", key=7, **heads), exact[:, 7], layer)
    rows = [1, 2, 20]
    close(floats(answers, "row", queries="20-21,1-3", **heads), mean(*exact[rows]), layer)
    part = {"rows": "8-16", "columns": "4-8"}
    ((query, key, effect),) = json.loads(asked(answers, "links", n=1, **part, **heads).body)[
        "links"
    ]
    assert (query, key) == strongest(exact, 1, slice(8, 16), slice(4, 8))[0][:2]
    close(effect, exact[query, key], layer)


@pytest.mark.parametrize("few", [0, 2**30])
def test_a_large_head_is_read_in_samples_until_it_is_exact(monkeypatch, few):
    monkeypatch.setattr(_effects, "DIRECT_PAIRS", 1000)
    monkeypatch.setattr(_effects, "FEW_PAIRS", few)
    monkeypatch.setattr(_effects, "PAIRS_SLICE", 2**12)
    (layer,), answers = RECORDINGS["several tiles"].layers, Answers([RECORDINGS["several tiles"]])
    exact, head = dense(layer, 1), {"layer": 0, "head": 1, "effect": "knockout"}
    first = asked(answers, "tile", plane="max", level=5, row=0, column=0, **head)
    assert 0 < first.coverage <= 1
    for level in (2, 3, 5, 6, 9):
        close(whole(answers, 300, 300, level, **head), binned(exact, 1 << level), layer)
    found = json.loads(asked(answers, "links", n=20, **head).body)
    assert [(i, j) for i, j, _ in found["links"]] == [link[:2] for link in strongest(exact, 20)]
    monkeypatch.setattr(_effects, "BUDGET_S", -1.0)
    shares = [asked(answers, "column", key=3, **head).coverage for _ in range(3)]
    assert 0 < shares[0] < shares[1] < shares[2] < 1
    close(floats(answers, "column", key=3, **head), exact[:, 3], layer)
    answers.close()


def test_the_largest_effects_are_those_of_every_head():
    later, plain = explained(700, seed=7, causal=True), Layer(*(numbers(2, 700, 6, seed=1),) * 3)
    answers = Answers([of(later, plain)])
    facts = json.loads(asked(answers, "about").body)["recordings"][0]["layers"]
    assert [found["effects"] for found in facts] == [list(KINDS), []]
    for kind in ("knockout", "change"):
        largest = json.loads(asked(answers, "effects", effect=kind).body)["largest"]
        assert largest[1] is None
        exact = np.array([np.nanmax(abs(dense(later, h, kind))) for h in range(4)])
        rows = np.square(later.gradient).sum((0, 2)).argsort()[-16:]
        read = np.array([np.nanmax(abs(dense(later, h, kind)[rows])) for h in range(4)])
        close(largest[0], read, later, kind)
        if kind == "knockout":  # those of the rows with the largest gradients are nearly all
            assert (read > 0.5 * exact).all()
    pair = floats(answers, "pair", query=3, key=1, effect="knockout")
    assert np.isnan(pair[4:]).all()
    assert np.isfinite(pair[:4]).all()


def test_tensors_have_effects_too():
    found = explained(causal=True)
    tensors = (torch.from_numpy(x) for x in (found.query, found.key, found.value))
    layer = Layer(*tensors, gradient=torch.from_numpy(found.gradient), causal=True)
    answers = Answers([of(layer)])
    for level in (0, 2):
        picture = whole(answers, L, L, level, layer=0, head=2, effect="knockout")
        close(picture, binned(dense(found, 2), 1 << level), found)


BAD = {
    "tile?layer=0&head=0&plane=mass&level=0&row=0&column=0&effect=knockout": "plane is 'mass'",
    "row?layer=0&head=0&query=0&effect=ablation": "effect is 'ablation'; there are knockout,",
    "row?layer=0&head=0&query=0&effect=knockout&first=hidden": "leave first=hidden out",
    "row?layer=0&head=0&query=0&effect=knockout&unit=word": "leave unit out",
    "links?layer=0&head=0&n=1&effect=knockout&on=0": "leave on out",
    "sums?layer=0&head=0&effect=knockout": "'effect' is not a parameter",
    "row?layer=1&head=0&query=0&effect=knockout": "this recording has no gradients",
    "effects?recording=0": "effect is missing",
}


def test_what_has_no_effects_is_refused_with_a_sentence():
    plain = Layer(*(numbers(4, L, 6, seed=1),) * 3)
    answers = Answers([of(explained(causal=True), plain)])
    for request, sentence in BAD.items():
        answer = answers.answer(*request.split("?"))
        assert answer.status == 400
        assert sentence in answer.body.decode()
