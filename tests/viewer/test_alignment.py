"""Tokens of two texts beside one another, and the weights at their counterparts."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.recording import Layer, Recording
from regard.viewer import _differences, overview
from regard.viewer._alignment import (
    MOST_REPLACED,
    Run,
    _common,
    _numbered,
    align,
    places,
    runs_of,
)
from regard.viewer.answer import Answers
from viewer.map_page import log_weights, made, pooled

TIRED = ["<bos>", "The", " c", "at", " s", "at", " on", " it", " was", " t", "i", "red", "."]
SOFT = ["<bos>", "The", " c", "at", " s", "at", " on", " it", " was", " so", "ft", "."]
TEXTS = st.lists(st.sampled_from("abcde"), max_size=40)


def common(one, other):
    """The length of a longest common subsequence, by its definition."""
    table = np.zeros((len(one) + 1, len(other) + 1), int)
    for i, a in enumerate(one):
        for j, b in enumerate(other):
            longer = table[i, j] + 1
            table[i + 1, j + 1] = longer if a == b else max(table[i, j + 1], table[i + 1, j])
    return table[-1, -1]


def paired(runs):
    return [(run.start + n, run.there + n) for run in runs for n in range(run.length)]


@settings(max_examples=400, deadline=None)
@given(TEXTS, TEXTS)
def test_as_many_equal_tokens_are_paired_as_can_be_in_their_order(one, other):
    runs = runs_of(one, other)
    pairs = paired(runs)
    assert sum(run.length for run in _common(*_numbered(one, other))) == common(one, other)
    assert sum(one[i] == other[j] for i, j in pairs) <= common(one, other)
    assert all(a < c and b < d for (a, b), (c, d) in itertools.pairwise(pairs))
    assert all(0 <= i < len(one) and 0 <= j < len(other) for i, j in pairs)
    ends = [(run.start + run.length, run.there + run.length) for run in runs]
    assert all(end != tuple(run[:2]) for end, run in zip(ends, runs[1:]))  # runs are whole


@settings(max_examples=200, deadline=None)
@given(TEXTS, TEXTS)
def test_what_is_paired_without_being_equal_is_all_that_lies_between_equal_tokens(one, other):
    equal = [(i, j) for i, j in paired(runs_of(one, other)) if one[i] == other[j]]
    found = set(paired(runs_of(one, other)))
    for (a, b), (c, d) in zip([(-1, -1), *equal], [*equal, (len(one), len(other))]):
        between = set(zip(range(a + 1, c), range(b + 1, d)))
        alike = c - a == d - b and c - a - 1 <= MOST_REPLACED
        assert found & between == (between if alike else set())


@given(TEXTS)
def test_a_text_is_its_own_counterpart(text):
    assert runs_of(text, text) == ((Run(0, 0, len(text)),) if text else ())


def test_a_replaced_phrase_is_paired_and_a_replaced_passage_is_not():
    long = [f"a{n}" for n in range(MOST_REPLACED + 1)], [f"b{n}" for n in range(MOST_REPLACED + 1)]
    for count, pairs in ((MOST_REPLACED, MOST_REPLACED + 2), (MOST_REPLACED + 1, 2)):
        one, other = (["x", *side[:count], "y"] for side in long)
        assert len(paired(runs_of(one, other))) == pairs
    assert runs_of(TIRED, SOFT) == (Run(0, 0, 9), Run(12, 11, 1))


def test_a_token_that_two_passages_share_by_chance_is_not_paired():
    here, there = ([*(f"{x}{n}" for n in range(40))] for x in "ab")
    one, other = (["x", *side[:20], ",", *side[20:], "y"] for side in (here, there))
    assert paired(runs_of(one, other)) == [(0, 0), (42, 42)]
    few = [["x", *side[:3], ",", *side[3:5], "y"] for side in (here, there[1:])]
    assert len(paired(runs_of(*few))) == 8
    assert paired(runs_of(few[0][:3] + few[0][4:], few[1])) == [
        (0, 0),
        (3, 4),
        (4, 5),
        (5, 6),
        (6, 7),
    ]


def test_spaces_are_equal_however_tokenizers_write_them():
    assert runs_of(["The", "Ġcat", "Ċ"], ["The", "▁cat", "\n"]) == (Run(0, 0, 3),)


def test_long_texts_are_aligned():
    random = np.random.default_rng(0)
    one = [f"t{n}" for n in random.zipf(1.3, 20_000) % 3000]
    kept = random.random(len(one)) > 0.03
    other = ["new", *(token for token, keep in zip(one, kept) if keep), "end"]
    assert len(paired(runs_of(one, other))) >= kept.sum()


def crossed(keys, queries, seed=0):
    random = np.random.default_rng(seed)
    q, k = (random.standard_normal((2, len(x), 4)).astype("f") for x in (queries, keys))
    return Recording(keys, [Layer(q, k)], query_tokens=queries)


def test_queries_of_another_text_are_aligned_by_it():
    one = crossed(["a", "b", "c"], ["x", "y"])
    other = crossed(["b", "c"], ["w", "x", "y"])
    found = align(one, other)
    assert found.keys == (Run(1, 0, 2),)
    assert found.queries == (Run(0, 1, 2),)
    assert found.turned() == align(other, one)


def test_the_last_queries_of_a_text_have_the_counterparts_that_they_have_as_keys():
    random = np.random.default_rng(0)

    def last(tokens, count):
        q, k = (random.standard_normal((2, n, 4)).astype("f") for n in (count, len(tokens)))
        return Recording(tokens, [Layer(q, k, causal=True)], query_tokens=tokens[-count:])

    one, other = last(["a", "b", "b", "c", "b"], 3), last(["z", "a", "b", "c", "b"], 4)
    found, whole = align(one, other), runs_of(one.tokens, other.tokens)
    assert [(i + 2, j + 1) for i, j in paired(found.queries)] == [
        (i, j) for i, j in paired(whole) if i >= 2 and j >= 1
    ]


def spelled(tokens, *, heads=2, seed=0, size=8, **options):
    """A recording of these texts, with weights that are not all alike."""
    found = made(len(tokens), heads=heads, seed=seed, size=size, **options)
    return Recording(tokens, found.layers)


def changed_text(count, seed=0):
    """A text of words, and the same with some left out, replaced and added."""
    random = np.random.default_rng(seed)
    one = [f" w{n % 90}" for n in range(count)]
    fates = random.random(count)
    other = [
        token
        for n, token in enumerate(one)
        for token in ([], [f" x{n}"], [token, " new"], [token])[
            np.searchsorted([0.1, 0.2, 0.3], fates[n])
        ]
    ]
    return one, other or ["."]


def gathered(one, other, head, alignment):
    """ln of both weights on the tokens of one, NaN where there is no counterpart."""
    queries = places(alignment.queries, len(one.query_tokens))
    keys = places(alignment.keys, len(one.tokens))
    lacks = (queries < 0)[:, None] | (keys < 0)
    own, there = log_weights(one, head), log_weights(other, head)
    there = there[np.ix_(np.maximum(queries, 0), np.maximum(keys, 0))]
    return np.where(lacks, np.nan, own), np.where(lacks, np.nan, there)


def floats(answers, path, **parameters):
    query = "&".join(f"{name}={value}" for name, value in parameters.items())
    answer = answers.answer(path, query)
    while answer.coverage < 1 and answer.media_type != "application/json":
        answer = answers.answer(path, query)
    assert answer.status == 200, answer.body
    return np.frombuffer(answer.body, "<f4")


def asked(answers, path, **parameters):
    query = "&".join(f"{name}={value}" for name, value in parameters.items())
    answer = answers.answer(path, query)
    assert answer.status == 200, answer.body
    return json.loads(answer.body)


@pytest.mark.parametrize("count", [1, 7, 97, 300])
@pytest.mark.parametrize("worker", [False, True], ids=["direct", "worker"])
def test_tiles_of_two_texts_are_those_of_gathered_weights(count, worker, monkeypatch):
    if worker:
        monkeypatch.setattr(overview, "DIRECT_WORK", 0)
    one, other = (spelled(text, seed=n) for n, text in enumerate(changed_text(count)))
    answers = Answers([one, other])
    both = gathered(one, other, 1, align(one, other))
    at = {"layer": 0, "head": 1, "row": 0, "column": 0}
    for level in (0, 1, 3, 5, 9):
        for plane in ("max", "mass"):
            ways = [{"recording": 0, "against": 1}, {"recording": 1, "on": 0}]
            for way, logs in zip(ways, both):
                found = floats(answers, "tile", **way, **at, plane=plane, level=level)
                expected = pooled(logs, level, plane)[:256, :256]
                part = found.reshape(256, 256)[: expected.shape[0], : expected.shape[1]]
                np.testing.assert_allclose(part, expected, rtol=1e-5, atol=1e-5)
    answers.close()


def test_rows_columns_and_links_are_of_counterparts():
    one, other = (spelled(text, seed=n) for n, text in enumerate(changed_text(97)))
    answers = Answers([one, other])
    own, there = gathered(one, other, 0, align(one, other))
    head = {"layer": 0, "head": 0}
    for logs, way in ((own, {"recording": 0, "against": 1}), (there, {"recording": 1, "on": 0})):
        for n in (0, 40, 96):
            row, column = floats(answers, "row", **way, **head, query=n), logs[n]
            np.testing.assert_allclose(row, column, rtol=1e-5, atol=1e-5)
            column = floats(answers, "column", **way, **head, key=n)
            np.testing.assert_allclose(column, logs[:, n], rtol=1e-5, atol=1e-5)
    links = asked(answers, "links", recording=0, against=1, **head, n=500)["links"]
    assert all(np.isfinite(own[query, key]) for query, key, _ in links)
    assert asked(answers, "links", recording=0, against=1, **head, n=1, rows="20-60")["links"]
    answers.close()


@pytest.mark.parametrize("count", [1, 7, 97, 300])
def test_the_pairs_that_changed_most_are_those_of_gathered_weights(count):
    one, other = (spelled(text, seed=n) for n, text in enumerate(changed_text(count)))
    answers = Answers([one, other])
    own, there = gathered(one, other, 1, align(one, other))
    difference = np.exp(np.nan_to_num(own, nan=-np.inf)) - np.exp(np.nan_to_num(there, nan=-np.inf))
    heads = {"layer": 0, "head": 1, "with": 1, "with_layer": 0, "with_head": 1}
    found = asked(answers, "changed", **heads, n=20)["links"]
    sizes = np.sort(np.abs(difference[difference != 0]))[::-1][:20]
    np.testing.assert_allclose([abs(x) for *_, x in found], sizes, rtol=1e-4, atol=1e-6)
    for query, key, x in found:
        assert abs(x - difference[query, key]) < 1e-5
    answers.close()


def test_the_change_of_a_head_is_half_the_sum_over_counterparts():
    one, other = (spelled(text, seed=n) for n, text in enumerate(changed_text(97)))
    answers = Answers([one, other])
    alignment = align(one, other)
    rows = places(alignment.queries, len(one.tokens)) >= 0
    for head, found in enumerate(asked(answers, "change", layer=0, **{"with": 1})["change"]):
        weights = [
            np.exp(np.nan_to_num(x, nan=-np.inf)) for x in gathered(one, other, head, alignment)
        ]
        assert abs(found - np.abs(weights[0] - weights[1])[rows].sum() / 2 / rows.sum()) < 1e-5
    answers.close()


def test_equal_heads_did_not_change_and_those_that_are_not_there_have_no_number():
    one = spelled([f" w{n}" for n in range(30)], heads=2)
    few = Recording(one.tokens, [one.layers[0].head(1)])
    answers = Answers([one, one, few])
    assert asked(answers, "change", layer=0, **{"with": 1})["change"] == [0, 0]
    assert asked(answers, "change", layer=0, **{"with": 2})["change"] == [None, 0]
    heads = {"layer": 0, "head": 1, "with": 1, "with_layer": 0, "with_head": 1}
    assert asked(answers, "changed", **heads, n=5)["links"] == []
    answers.close()


def test_texts_without_a_common_token_have_no_change():
    one, other = (spelled([f"{x}{n}" for n in range(20)]) for x in "ab")
    answers = Answers([one, other])
    assert asked(answers, "change", layer=0, **{"with": 1})["change"] == [None, None]
    assert asked(answers, "alignment", **{"with": 1}) == {"queries": [], "keys": []}
    tile = {"layer": 0, "head": 0, "level": 0, "row": 0, "column": 0, "plane": "max"}
    assert np.isnan(floats(answers, "tile", **tile, recording=1, on=0)).all()
    answers.close()


def test_a_long_text_is_compared_by_a_sample_of_its_queries(monkeypatch):
    monkeypatch.setattr(_differences, "MOST_WEIGHTS", 1)
    one, other = (spelled([f" w{n}" for n in range(400)], seed=n) for n in range(2))
    answers = Answers([one, other])
    found = asked(answers, "change", layer=0, **{"with": 1})
    assert found["coverage"] == 80 / 400  # every fifth: no more than FEWEST_QUERIES
    difference = np.exp(np.nan_to_num(log_weights(one, 0), nan=-np.inf)) - np.exp(
        np.nan_to_num(log_weights(other, 0), nan=-np.inf)
    )
    rows = range(400)[2::5]
    assert abs(found["change"][0] - np.abs(difference[rows]).sum() / 2 / len(rows)) < 1e-5
    answers.close()


def test_without_the_first_token_its_share_is_the_others_in_both():
    one, other = (spelled(text, seed=n) for n, text in enumerate((TIRED, SOFT)))
    answers = Answers([one, other])
    row = floats(answers, "row", recording=1, on=0, layer=0, head=0, query=12, first="hidden")
    assert np.isnan(row[[0, 9, 10, 11]]).all()
    plain = np.exp(log_weights(other, 0)[11])
    np.testing.assert_allclose(np.exp(row[1:9]), plain[1:9] / (1 - plain[0]), rtol=1e-4)
    found = asked(answers, "change", layer=0, **{"with": 1}, first="hidden")["change"]
    assert all(0 < x < 1 for x in found)
    answers.close()


@pytest.mark.parametrize(
    ("path", "query", "said"),
    [
        ("row", "layer=0&head=0&query=0&on=1&against=1", "two ways"),
        ("row", "layer=0&head=0&query=0&on=2", "there are 2, 0 to 1"),
        ("row", "recording=1&layer=0&head=0&query=13&on=0", "query is 13"),
        ("alignment", "", "with is missing"),
        ("changed", "layer=0&head=0&with=1&with_layer=1&with_head=0&n=3", "with_layer is 1"),
        ("visible", "layer=0&head=0&on=1", "'on' is not a parameter"),
    ],
)
def test_what_cannot_be_compared_is_refused(path, query, said):
    answers = Answers([spelled(TIRED), spelled(SOFT)])
    answer = answers.answer(path, query)
    assert answer.status == 400
    assert said in answer.body.decode()
    answers.close()
