"""Words: which pieces make one, and weights by words against the sums of those of pieces."""

import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import regard
from recordings import layer, numbers
from regard._base.words import (
    are_function_words,
    is_newline,
    is_punctuation,
    spelled,
    word_starts,
)
from regard._call.visible import sees
from regard.recording import Layer, Recording, Words, WordWeights
from traced import peak_bytes

TEXTS = {
    "a word goes on until white space": ["<bos>", "The", " an", "im", "al", " sat"],
    "signs stand alone": ["it", "'", "s", " (", "new", "er", ")", ".", "\n", "Now"],
    "names are words": ["def", " head", "_", "scores", "(", "x2", ")"],
    "white space stands alone": ["if", " x", ":", "\n    ", "return", " x"],
    "a space may come last": ["the ", "cat", "s ", "sat"],
    "sentencepiece": ["<s>", "▁jour", "ney", "▁with", "<0x0A>", "ne", "xt"],
    "bytes": ["Ġjour", "ney", "Ċ", "Ġwith"],
    "wordpiece": ["[CLS]", "jour", "##ney", "with", ".", "[SEP]"],
    "ends of words": ["jour", "ney</w>", "with</w>", "a</w>"],
    "no white space: tokens are words": ["Your", "journey", "starts"],
    "no spaces between words": ["a", " b", "日本", "語", "c"],
    "special": ["a", " b", "<|endoftext|>", "c"],
}
STARTS = [
    [0, 1, 2, 5], [0, 1, 2, 3, 4, 6, 7, 8, 9], [0, 1, 4, 5, 6], [0, 1, 2, 3, 4, 5], [0, 1, 3],
    [0, 1, 3, 4, 5], [0, 2, 3], [0, 1, 3, 4, 5], [0, 2, 3], [0, 1, 2], [0, 1, 2, 3, 4],
    [0, 1, 2, 3],
]  # fmt: skip


@pytest.mark.parametrize(("tokens", "starts"), [*zip(TEXTS.values(), STARTS)], ids=TEXTS)
def test_words_are_runs_of_pieces(tokens, starts):
    assert word_starts(tokens).tolist() == starts


def test_kinds_of_tokens():
    assert [is_newline(x) for x in ("\n", " \n\n  ", "Ċ", ".\n", "a\n", " ")] == [
        True, True, True, True, False, False,
    ]  # fmt: skip
    assert [is_punctuation(x) for x in (".", " (", "):", "<bos>", "\n", "  ", "_", "a.")] == [
        True, True, True, False, False, False, False, False,
    ]  # fmt: skip
    assert are_function_words([" The", "of", "journey", "▁and", "is</w>"]).tolist() == [
        True, True, False, True, True,
    ]  # fmt: skip


@given(st.lists(st.sampled_from(["a", " b", "\n", ".", "<bos>", "", " ", "##x", "y</w>", "語"])))
def test_every_text_is_cut_into_words_that_begin_with_its_first_token(tokens):
    starts = word_starts(tokens)
    assert starts.tolist() == sorted({*starts.tolist()})
    assert (len(starts) == 0) == (not tokens)
    if tokens:
        assert starts[0] == 0
        assert starts[-1] < len(tokens)


def summed(weights, words):
    """The definition, from the whole matrix of one layer."""
    by_key = np.add.reduceat(np.asarray(weights, np.float64), words.starts, -1)
    counts = np.diff([*words.query_starts, weights.shape[-2]])[:, None]
    return np.add.reduceat(by_key, words.query_starts, -2) / counts


OPTIONS = {
    "causal": {"causal": True},
    "all": {},
    "window": {"causal": True, "window": (3, 0)},
    "segments": {"segments": np.arange(30) // 8, "causal": True},
    "sinks": {"sinks": numbers(4), "causal": True},
}


def pieces(count, seed=0):
    random = np.random.default_rng(seed)
    return ["<bos>", *random.choice([" a", "b", "c", ".", " dd", "\n"], count - 1)]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_weights_of_words_are_sums_over_keys_and_means_over_queries(options):
    recording = Recording(pieces(30), [layer(Lq=30, Lk=30, **options)])
    words = recording.in_words()
    assert isinstance(words, Words)
    assert "".join(words.tokens) == "".join(recording.tokens)
    weights = words.weights[0]
    expected = summed(recording.weights[0], words)
    assert weights.shape == expected.shape
    np.testing.assert_allclose(np.asarray(weights), expected, atol=1e-6)
    row_sums = np.asarray(recording.weights[0], np.float64).sum(-1)
    means = [x.mean() for x in np.split(row_sums[2], words.query_starts[1:])]
    np.testing.assert_allclose(weights[2].sum(-1), means, atol=1e-6)
    np.testing.assert_allclose(weights.head(3)[5], expected[3, 5], atol=1e-6)
    np.testing.assert_allclose(weights[1, 2:9:3, -1], expected[1, 2:9:3, -1], atol=1e-6)
    assert weights[0, 1, 1] == pytest.approx(expected[0, 1, 1], abs=1e-6)


def test_without_queries_every_result_is_empty():
    of_layer = Recording(list("abcd"), [layer(Lq=0)]).in_words().weights[0]
    for words, axes in ((of_layer, (4,)), (of_layer.head(1), ())):
        assert [x.shape for x in words.topk(2)] == [(*axes, 0, 2)] * 2
        assert [x.dtype for x in words.topk(2)] == [np.float32, np.int64]
        assert {x.shape for x in words.strongest(3)} == {(*axes, 0)}
        assert words[...].shape == words.pool().shape == (*axes, 0, 4)


def test_topk_strongest_and_pool_are_those_of_the_matrix_of_words(monkeypatch):
    monkeypatch.setattr("regard.recording._words.BLOCK_WEIGHTS", 200)
    recording = Recording(pieces(60), [layer(Lq=60, Lk=60, causal=True)])
    words = recording.in_words().weights[0]
    whole = np.asarray(words)
    values, indices = words.topk(3)
    order = np.argsort(-whole, -1, kind="stable")[..., :3]
    np.testing.assert_array_equal(indices, order)
    np.testing.assert_array_equal(values, np.take_along_axis(whole, order, -1))
    query, key, weight = words.strongest(5)
    for h in range(4):
        np.testing.assert_allclose(weight[h], np.sort(whole[h].reshape(-1))[::-1][:5])
        np.testing.assert_array_equal(whole[h, query[h], key[h]], weight[h])
    full = words.pool(whole.shape[1:])
    hidden = np.triu(np.ones(whole.shape[1:], bool), 1)
    assert (np.isnan(full) == hidden).all()
    np.testing.assert_allclose(np.exp(full[:, ~hidden]), whole[:, ~hidden], rtol=1e-5)
    for how in ("max", "mass"):
        np.testing.assert_allclose(words.head(1).pool((4, 5), how), words.pool((4, 5), how)[1])
    Wq, Wk = whole.shape[1:]
    edges = [np.arange(n + 1) * size // n for n, size in ((4, Wq), (5, Wk))]
    for r in range(4):
        for c in range(5):
            part = whole[:, edges[0][r] : edges[0][r + 1], edges[1][c] : edges[1][c + 1]]
            if np.isnan(words.pool((4, 5))[0, r, c]):
                assert not part.any()
                continue
            np.testing.assert_allclose(
                np.exp(words.pool((4, 5))[:, r, c]), part.max((1, 2)), rtol=1e-5
            )
            mass = np.exp(words.pool((4, 5), "mass")[:, r, c])
            np.testing.assert_allclose(mass, part.sum(-1).mean(-1), rtol=1e-5)


@pytest.mark.parametrize(
    "options", [{"causal": True}, {"window": (3, 0)}, {"window": (0, 3)}], ids=str
)
def test_one_bin_has_the_words_of_several_blocks(options, monkeypatch):
    monkeypatch.setattr("regard.recording._words.BLOCK_WEIGHTS", 200)
    words = Recording(pieces(60), [layer(Lq=60, Lk=60, **options)]).in_words().weights[0]
    assert len(list(words.head(0)._blocks())) > 3
    whole = np.asarray(words)
    rows, columns = slice(2, None), slice(1, None, 2)
    parts = {"rows": rows, "columns": columns}
    for part, chosen in ((whole, {}), (whole[:, rows, columns], parts)):
        size = 1, part.shape[2]
        mass, largest = (np.exp(words.pool(size, how, **chosen))[:, 0] for how in ("mass", "max"))
        np.testing.assert_allclose(np.nan_to_num(mass), part.mean(1), rtol=1e-5)
        np.testing.assert_allclose(np.nan_to_num(largest), part.max(1), rtol=1e-5)


RULES = {
    **OPTIONS,
    "mask": {"mask": (numbers(4, 30, 30) > 0.8)},
    "one mask": {"mask": (numbers(1, 30, 30) > 0.8), "causal": True},
    "cut": {"edits": [regard.Edit(slice(0, 2), slice(3, 20), slice(4, 9), factor=0)]},
}


@pytest.mark.parametrize("options", RULES.values(), ids=RULES)
def test_a_pair_of_words_is_masked_where_all_pairs_of_pieces_are(options, monkeypatch):
    monkeypatch.setattr("regard.recording._words.BLOCK_WEIGHTS", 200)
    recording = Recording(pieces(30), [layer(Lq=30, Lk=30, **options)])
    words = recording.in_words()
    seen = ~np.isnan(recording.weights[0].pool((30, 30)))
    rows, columns = words.query_starts, words.starts
    any_ = np.logical_or.reduceat(np.logical_or.reduceat(seen, columns, 2), rows, 1)
    found = words.weights[0].pool(any_.shape[1:])
    np.testing.assert_array_equal(~np.isnan(found), any_)
    parts = words.weights[0].pool((99, 3), "mass", slice(1, None, 3), slice(2, 8))
    assert (np.isnan(parts) == ~np.logical_or.reduceat(any_[:, 1::3, 2:8], [0, 2, 4], 2)).all()


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 40), st.integers(0, 99), st.booleans())
def test_sums_over_words_are_sums_over_pieces(length, seed, causal):
    recording = Recording(pieces(length, seed), [layer(Lq=length, Lk=length, causal=causal)])
    words = recording.in_words()
    whole = np.asarray(words.weights[0])
    np.testing.assert_allclose(whole, summed(recording.weights[0], words), atol=1e-6)
    np.testing.assert_allclose(whole.sum(-1), 1, atol=1e-5)


def test_words_of_cross_attention_and_of_the_last_queries():
    tokens = pieces(20)
    cross = Recording(tokens, [layer(Lq=4, Lk=20)], query_tokens=[" Wo", "rt", " un", "d"])
    words = cross.in_words()
    assert words.query_tokens == (" Wort", " und")
    np.testing.assert_allclose(words.weights[0], summed(cross.weights[0], words), atol=1e-6)
    last = Recording([" a", "b", " c", "d", " e"], [layer(Lq=2, Lk=5, causal=True)]).in_words()
    assert last.query_tokens == ("d", " e")
    assert last.query_starts.tolist() == [0, 1]


def test_layers_and_heads_are_found_under_their_numbers():
    made = layer(2, 1, Lq=9, Lk=9, number=7, head_numbers=(3, 8))
    words = Recording(pieces(9), [made]).in_words()
    weights = words.weights[7]
    assert isinstance(weights, WordWeights)
    np.testing.assert_array_equal(weights[8, 1], weights.head(8)[1])
    assert len(words.weights) == 1
    with pytest.raises(IndexError, match="layer 0 was not recorded; there are 7"):
        words.weights[0]
    with pytest.raises(IndexError, match="head 0 was not recorded"):
        weights.head(0)
    assert "of heads 3, 8" in repr(weights)


def test_html_shows_pictures_of_words():
    made = layer(2, 1, Lq=9, Lk=9, number=7, head_numbers=(3, 8))
    weights = Recording(pieces(9), [made]).in_words().weights[7]
    html = weights._repr_html_()
    assert repr(weights) in html
    assert re.findall("<figcaption>(.*?)</figcaption>", html) == ["weights[3]", "weights[8]"]
    assert ">weights</figcaption>" in weights.head(8)._repr_html_()
    assert "<img" not in weights.part(slice(0, 0))._repr_html_()


def test_html_of_many_heads_or_words_shows_the_first_or_none():
    x = np.ones((9, 2, 1), np.float32)
    html = Recording([" a", " b"], [Layer(x, x)]).in_words().weights[0]._repr_html_()
    assert html.count("<img") == 8
    assert "and 1 more" in html
    x = np.ones((1, 5000, 1), np.float32)
    html = Recording([" a"] * 5000, [Layer(x, x)]).in_words().weights[0]._repr_html_()
    assert "<img" not in html
    assert "WordWeights(1, 5000, 5000)" in html


def test_a_long_text_takes_memory_for_a_block():
    count = 6000
    x = numbers(1, count, 8)
    tokens = [" a" if n % 2 else "b" for n in range(count)]
    recording = Recording(tokens, [Layer(x, x, causal=True)])
    words = recording.in_words().weights[0].head(0)
    peak = peak_bytes(lambda: (words.strongest(9), words.pool((32, 32))))
    assert peak < 60e6  # all of them would take 144 MB, and 36 in words


def test_weights_of_pieces_are_summed_without_being_stored(monkeypatch):
    monkeypatch.setattr("regard.recording._words.BLOCK_WEIGHTS", 2**30)
    x = numbers(1, 1000, 8)
    recording = Recording([" a", *"bcdefghij"] * 100, [Layer(x, x, causal=True)])
    words = recording.in_words().weights[0].head(0)
    peak = peak_bytes(lambda: (words.strongest(9), words.topk(3), words.pool((32, 32))))
    assert peak < 2e6  # those of pieces would take 4 MB, and those of words take 0.1


def test_what_cannot_be_given_is_said():
    words = Recording(pieces(9), [layer(Lq=9, Lk=9)]).in_words().weights[0]
    with pytest.raises(regard.ShapeError, match="topk: k is 99; it must be between 0"):
        words.topk(99)
    with pytest.raises(TypeError, match="topk: k is a float; an int is needed"):
        words.topk(2.5)
    with pytest.raises(ValueError, match="strongest: n is -1; it must not be negative"):
        words.strongest(-1)
    for n in (2.5, True, "3"):
        with pytest.raises(TypeError, match=f"strongest: n {n!r} is a .*; an int is needed"):
            words.strongest(n)
    for size in (3, (2, 3, 4), (2.5, 3)):
        with pytest.raises(TypeError, match=r"pool: size is .*; a pair of ints \(rows, columns\)"):
            words.pool(size)
    with pytest.raises(ValueError, match="pool: how is 'mean'"):
        words.pool(how="mean")
    with pytest.raises(ValueError, match=r"pool: size is \(0, 1\)"):
        words.pool((0, 1))
    with pytest.raises(IndexError, match="index 99 is out of range"):
        words[0, 99]
    with (
        regard.limits(weights_bytes=8),
        pytest.raises(regard.MaterializeError, match="weights of words"),
    ):
        np.asarray(words)


def test_tensors_give_arrays():
    x = torch.from_numpy(numbers(2, 9, 4))
    words = Recording(pieces(9), [Layer(x, x)]).in_words().weights[0]
    assert isinstance(words[0, 1], np.ndarray)
    assert words.strongest(2).weight.dtype == np.float32


def test_characters_whose_bytes_several_tokens_have_are_whole():
    for tokens, whole in [
        (["na", r"\xc3", r"\xaf", "ve"], ["na", "", "ï", "ve"]),
        ([r"a\xe2\x98", r"\x83b", r"c\xc3", r"\xa9"], ["a", "☃b", "c", "é"]),
        ([r"\xd0", r"\xbc\xd0", r"\xb8"], ["", "м", "и"]),
    ]:
        assert spelled(tokens) == whole
    for tokens in [
        [r"\xc3\xa9", "b"], [r"\xc", r"3\xa9"], [r"\xc3", "a"], [r"\xa9", r"\xc3"], ["a", "b"], []
    ]:  # fmt: skip
        assert spelled(tokens) == tokens  # written so in the text, or no character
    tokens = ["<bos>", "na", r"\xc3", r"\xaf", "ve", " x"]
    recording = Recording(tokens, [Layer(*(numbers(1, 6, 4),) * 2)])
    assert recording.in_words().tokens == ("<bos>", "naïve", " x")


def test_a_piece_that_sees_nothing_shows_its_word_nothing():
    q = np.zeros((1, 4, 2), np.float32)
    ends = np.array([3, 0, 0, 0]), np.array([3, 4, 4, 4])  # the first: none, amid the second word
    (visible,) = sees(regard.AttentionWeights(q, q, intervals=ends)._call)
    words = np.array([0, 1]), np.array([0, 2])
    np.testing.assert_array_equal(visible.any_in_runs(*words)[0], [[False, False], [True, True]])
