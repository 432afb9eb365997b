"""Effects in the viewer: what the server answers, the page shows, and an exported page computes."""

import json
from urllib.parse import urlencode

import numpy as np
import pytest
import torch

from regard.recording import Layer
from regard.viewer import _effects
from regard.viewer.answer import Answers
from viewer.explained import (
    KINDS,
    RECORDINGS,
    L,
    binned,
    close,
    dense,
    explained,
    mean,
    numbers,
    of,
    strongest,
)

SIDE = 256


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
        close(whole(answers, 270, 270, level, **head), binned(exact, 1 << level), layer)
    found = json.loads(asked(answers, "links", n=20, **head).body)
    assert [(i, j) for i, j, _ in found["links"]] == [link[:2] for link in strongest(exact, 20)]
    monkeypatch.setattr(_effects, "BUDGET_S", -1.0)
    shares = [asked(answers, "column", key=3, **head).coverage for _ in range(3)]
    assert 0 < shares[0] < shares[1] < shares[2] < 1
    close(floats(answers, "column", key=3, **head), exact[:, 3], layer)
    answers.close()


def test_the_largest_effects_are_those_of_every_head(monkeypatch):
    monkeypatch.setattr(_effects, "FEW_QUERIES", 80)
    later, plain = explained(90, seed=7, causal=True), Layer(*(numbers(2, 90, 6, seed=1),) * 3)
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
