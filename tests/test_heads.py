"""What the scores of heads mean."""

import numpy as np
import pytest

import regard
from regard.heads import HeadScores, Reader, head_scores, place_to_open
from regard.recording import Layer, Recording

BIG = 1e4  # a score that leaves nothing to the others


def recording_of(weights, tokens, **options):
    """A recording whose heads have these weights, (heads, L, L): ln(weight) as q times identity."""
    length = weights.shape[-1]
    with np.errstate(divide="ignore"):
        query = np.maximum(np.log(weights), -BIG)
    key = np.broadcast_to(np.eye(length), query.shape)
    layer = Layer(query, key, causal=True, scale=1.0, **options)
    return Recording(tokens, [layer], model="made")


def looks_at(places):
    return np.eye(len(places))[places]


TOKENS = list("xabcabcab")


@pytest.fixture(scope="module")
def scores():
    i = np.arange(len(TOKENS))
    previous, first = looks_at(np.maximum(i - 1, 0)), looks_at(0 * i)
    induction = looks_at(np.where(i > 3, i - 2, 0))
    uniform = np.tril(np.ones((len(i), len(i))))
    uniform /= uniform.sum(-1, keepdims=True)
    return head_scores(recording_of(np.stack([previous, first, induction, uniform]), TOKENS))


def test_previous_token_score_is_the_mean_weight_one_before(scores):
    np.testing.assert_allclose(scores.previous[0], [1, 1 / 8, 1 / 8, np.mean(1 / np.arange(2, 10))])


def test_first_token_score_is_the_mean_weight_on_the_first_key(scores):
    np.testing.assert_allclose(scores.first[0], [1 / 8, 1, 3 / 8, np.mean(1 / np.arange(2, 10))])


def test_induction_score_counts_what_followed_earlier_occurrences(scores):
    # Queries 4 to 8 say a, b, c again; queries 7 and 8 have two earlier occurrences.
    expected = np.mean([1 / 5, 1 / 6, 1 / 7, 2 / 8, 2 / 9])
    np.testing.assert_allclose(scores.induction[0, 2:], [1, expected])


def test_entropy_is_in_nats(scores):
    np.testing.assert_allclose(scores.entropy[0], [0, 0, 0, np.mean(np.log(np.arange(1, 10)))])


def test_roles_are_the_highest_score_from_0_3_on(scores):
    roles = [scores.role(0, head) for head in range(4)]
    assert roles == ["previous token", "first token", "induction", "spread evenly"]


def test_where_every_word_is_one_token_the_word_before_is_the_token_before():
    words = [" the", " cat", " saw", " a", " dog"]
    i = np.arange(5)
    scores = head_scores(recording_of(looks_at(np.maximum(i - 1, 0))[None], words))
    assert np.isnan(scores["previous word"]).all()
    assert scores.role(0, 0) == "previous token"
    pieces = [" the", " c", "at", " s", "aw"]
    scores = head_scores(recording_of(looks_at(np.array([0, 0, 0, 2, 2]))[None], pieces))
    assert scores.role(0, 0) == "previous word"


def test_a_head_of_one_key_alone_is_none_of_function_words():
    words = [" red", " the", " cat", " saw", " of", " dog", " to", " end"]
    one, many = looks_at([0, 1, 1, 1, 1, 1, 1, 1]), looks_at([0, 1, 1, 1, 4, 4, 6, 6])
    scores = head_scores(recording_of(np.stack([one, many]), words))
    np.testing.assert_allclose(scores["function word"][0], 1)
    at = scores.roles.index("function word")
    np.testing.assert_allclose(scores.largest[0, :, at], [1, 3 / 7])
    assert "function word" not in scores.role(0, 0)
    assert scores.role(0, 1) == "function word"


def test_without_repetition_there_is_no_induction_score_and_no_such_role():
    scores = head_scores(recording_of(looks_at([0, 0, 0])[None], list("abc")))
    assert np.isnan(scores.induction).all()
    assert scores.role(0, 0) == "first token"


def test_one_token_has_an_entropy_and_no_places():
    scores = head_scores(recording_of(np.ones((1, 1, 1)), ["a"]))
    assert np.isnan(scores.previous).all()
    assert np.isnan(scores.first).all()
    assert scores.entropy.item() == 0
    assert scores.role(0, 0) == ""


def test_only_queries_that_see_an_earlier_occurrence_are_counted():
    tokens = list("abcdabcd")
    i = np.arange(8)
    weights = looks_at(np.maximum(i - 1, 0))[None]
    narrow = head_scores(recording_of(weights, tokens, window=(1, 0)))
    assert np.isnan(narrow.induction).all()


def test_a_long_text_is_scored_on_evenly_spaced_queries():
    random = np.random.default_rng(0)
    q, k = random.normal(size=(2, 3, 1500, 8)).astype(np.float32)
    tokens = [str(n % 97) for n in range(1500)]
    recording = Recording(tokens, [Layer(q, k, causal=True)])
    whole, part = head_scores(recording, queries=1500), head_scores(recording)
    assert whole.queries == 1500
    assert 400 <= part.queries <= 512
    np.testing.assert_allclose(part.entropy, whole.entropy, rtol=0.05)
    np.testing.assert_allclose(whole.entropy[0], recording.weights[0].entropy().mean(-1), rtol=1e-5)


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 129, 1000])
@pytest.mark.parametrize("queries", [1, 2, 64, 100, 5000, None])
def test_queries_that_are_read_are_evenly_spaced_and_no_more_than_asked(length, queries):
    from regard.heads._measure import sampled

    rows = sampled(length, length, queries)
    assert 1 <= len(rows) <= (queries or 512)
    assert rows[-1] < length
    assert length - rows[-1] <= rows.step
    if length <= (queries or 512):
        assert rows == range(length)


def test_longer_texts_are_read_at_fewer_queries_at_a_step_that_is_a_prime():
    from regard.heads._measure import sampled

    for length in (2048, 16_384, 100_000):
        rows = sampled(length, length, None)
        assert 200 < len(rows) <= 512
        assert all(rows.step % n for n in range(2, rows.step))


def test_cross_attention_has_no_places_to_score():
    q = np.ones((1, 2, 3))
    k = np.ones((1, 4, 3))
    scores = head_scores(Recording(list("abcd"), [Layer(q, k)], query_tokens=list("xy")))
    for name in ("previous", "first", "induction"):
        assert np.isnan(getattr(scores, name)).all()
    assert scores.role(0, 0) == "spread evenly"
    np.testing.assert_allclose(scores.entropy, np.log(4))
    np.testing.assert_allclose(scores.received, 1 / 4)


def test_no_queries_are_an_error(scores):
    assert isinstance(scores, HeadScores)
    with pytest.raises(ValueError, match="queries is 0; at least 1"):
        head_scores(recording_of(np.ones((1, 1, 1)), ["a"]), queries=0)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (3, "an int"),
        ("a.safetensors", "a str"),
        (None, "a NoneType"),
        (regard.AttentionWeights(np.eye(2), np.eye(2)), "an AttentionWeights"),
    ],
)
def test_what_is_no_recording_is_told(given, found):
    told = rf"^head_scores: {found} is no Recording; .*Recording\(tokens, \[weights.layer\(\)"
    with pytest.raises(TypeError, match=told):
        head_scores(given)
    with pytest.raises(TypeError, match=told):
        place_to_open(given)


@pytest.mark.parametrize("name", ["queries", "receivers"])
@pytest.mark.parametrize("given", [2.5, True, "3", [3]])
def test_counts_of_heads_are_ints(name, given):
    recording = recording_of(np.ones((1, 1, 1)), ["a"])
    with pytest.raises(TypeError, match=f"^head_scores: {name} .* an int is needed"):
        recording.heads(**{name: given})
    counted = head_scores(recording, **{name: np.int64(1)})
    assert (counted.queries, counted.receivers.shape[-1]) == (1, 1)


def test_a_previous_token_head_is_no_induction_head_where_a_token_returns_after_one():
    tokens = list("xabaccd")  # b follows the first a and stands before the second
    previous = looks_at(np.maximum(np.arange(len(tokens)) - 1, 0))[None]
    scores = head_scores(recording_of(previous, tokens))
    assert np.isnan(scores.induction).all()
    assert scores.role(0, 0) == "previous token"


def test_an_induction_head_that_rests_on_the_first_token_is_an_induction_head():
    tokens = list("xabcdefgab")
    found = head_scores(recording_of(looks_at([0] * 8 + [2, 3])[None], tokens))
    assert found.first[0, 0] == pytest.approx(7 / 9)
    assert found.induction[0, 0] == 1
    assert found.role(0, 0) == "induction"


TEXT = [
    "<bos>", "The", " an", "im", "al", " of", " the", " kn", "ight", ",", "\n", "an", "im", "al",
    " and", " kn", "ight", ".", "\n", " It", " went", " fa", "r", ",", " and", " the", " king",
    " sl", "e", "pt", ".",
]  # fmt: skip
WORDS = [0, 1, 2, 2, 2, 5, 6, 7, 7, 9, 10, 11, 11, 11, 14, 15, 15, 17, 18, 19, 20, 21, 21, 23, 24,
         25, 26, 27, 27, 27, 30]  # fmt: skip


def last_of(kinds):
    """A head that looks at the last key of a kind, and else at the first token."""
    at = [0] * len(TEXT)
    for i in range(len(TEXT)):
        at[i] = max((j for j in range(1, i + 1) if TEXT[j].strip(" ") in kinds), default=0)
    return looks_at(np.array(at))


def exact_heads():
    """Name of each role, and a head that is exactly that."""
    i = np.arange(len(TEXT))
    words = np.array(WORDS)
    before = np.array([words[w - 1] if w > 1 else 0 for w in words])
    earlier = [[j for j in range(k - 1) if TEXT[j] == TEXT[k]] for k in i]
    follows = [[j + 1 for j in found if j + 1 < k - 1] for k, found in enumerate(earlier)]
    return {
        "previous token": looks_at(np.maximum(i - 1, 0)),
        "3 back": looks_at(np.maximum(i - 3, 0)),
        "self": looks_at(i),
        "first token": looks_at(0 * i),
        "induction": looks_at([found[-1] if found else 0 for found in follows]),
        "same token": looks_at([found[-1] if found else 0 for found in earlier]),
        "previous word": looks_at(before),
        "word start": looks_at(words),
        "newline": last_of({"\n"}),
        "punctuation": last_of({",", "."}),
        "function word": last_of({"The", "of", "the", "and", "It"}),
        "spread evenly": np.tril(np.ones((len(i), len(i)))) / (i[:, None] + 1),
    }


@pytest.fixture(scope="module")
def exact():
    return head_scores(recording_of(np.stack([*exact_heads().values()]), TEXT))


def test_a_query_whose_scores_are_all_minus_infinity_leaves_the_scores_of_its_head():
    random = np.random.default_rng(0)
    q, k = random.standard_normal((2, 2, 40, 4)).astype("f")
    bias = np.zeros((1, 40, 40), "f")
    bias[0, 20] = -np.inf
    tokens = [f"t{n % 7}" for n in range(40)]
    found, right = (
        Recording(tokens, [Layer(q, k, causal=True, **options)]).heads()
        for options in ({"bias": bias}, {"mask": bias == 0})
    )
    for name in ("first", "previous", "induction"):
        assert np.isfinite(found[name]).all()
        np.testing.assert_allclose(found[name], right[name], rtol=0.06)


@pytest.mark.parametrize("name", exact_heads())
def test_a_head_that_is_exactly_a_role_has_its_name(exact, name):
    at = list(exact_heads()).index(name)
    assert exact.role(0, at) == name
    score = exact[name][0, at]
    assert score > 0.7
    assert exact.says(0, at).startswith(f"L0H{at} · {name} {score:.0%}".replace("%", " %"))


def test_the_next_token_is_a_role_where_it_is_seen():
    i = np.arange(9)
    weights = looks_at(np.minimum(i + 1, 8))[None]
    query = np.maximum(np.log(weights, where=weights > 0, out=np.full_like(weights, -BIG)), -BIG)
    recording = Recording(list("abcdefghi"), [Layer(query, np.eye(9)[None], scale=1.0)])
    assert head_scores(recording).role(0, 0) == "next token"


def test_a_head_of_two_roles_is_a_mixture_with_both_shares():
    heads = exact_heads()
    mixed = 0.45 * heads["first token"] + 0.55 * heads["previous token"]
    scores = head_scores(recording_of(mixed[None], TEXT))
    assert scores.role(0, 0) == "previous token, first token"
    says = "L0H0 · previous token 56 %, first token 43 %: looks at the token just before and"
    assert scores.says(0, 0).startswith(says)


def test_a_head_whose_weights_are_no_numbers_says_so():
    q, k = np.random.default_rng(0).normal(size=(2, 2, 8, 4))
    q[1, 3] = np.nan
    scores = head_scores(Recording(list("abcdefgh"), [Layer(q, k, causal=True)]))
    assert scores.says(0, 1) == "L0H1 · not a number (NaN): some score is NaN or infinite"
    assert "NaN" not in scores.says(0, 0)
    assert scores.telling().head == 0


def test_scores_are_means_over_the_queries_that_see_such_a_key_against_even_weights(exact):
    uniform = list(exact_heads()).index("spread evenly")
    told = exact.scores[0, uniform, :-1], exact.even[0, uniform, :-1]
    np.testing.assert_allclose(*told, atol=1e-9)
    counted = dict(zip(exact.roles, exact.counted[0, 0]))
    length = len(TEXT)
    assert counted["previous token"] == counted["first token"] == length - 1
    assert counted["3 back"] == length - 3
    assert counted["newline"] == length - TEXT.index("\n")
    assert counted["word start"] == sum(w < i for i, w in enumerate(WORDS))
    assert counted["next token"] == 0


def test_weights_at_pairs_are_those_of_the_matrix():
    from recordings import layer, numbers
    from regard._call.visible import Seen
    from regard._weights.pairs import weights_at

    random = np.random.default_rng(0)
    some = {
        "grouped": {},
        "capped": {"softcap": 5.0, "causal": True},
        "window": {"causal": True, "window": (4, 0), "sinks": numbers(4)},
        "lengths": {"key_lengths": 17, "query_start": 0, "causal": True},
        "documents": {"segments": np.arange(20) // 6, "bias": numbers(4, 20, 20)},
        "mask": {"mask": random.random((4, 20, 20)) < 0.5, "bias": numbers(20)},
    }
    queries, keys = (x.reshape(-1) for x in np.indices((20, 20)))
    for name, options in some.items():
        weights = Recording(list("abcdefghijklmnopqrst"), [layer(Lq=20, Lk=20, **options)]).weights[
            0
        ]
        for step in (1, 3):
            part = weights.part(slice(0, None, step))
            kept = queries < part.shape[1]
            pairs = queries[kept], keys[kept]
            seen = Seen(part._call)
            found = weights_at(part._call, part.lse, *pairs, seen.pairs(*pairs))
            whole = np.asarray(part)
            expected = whole.reshape(4, -1)[:, pairs[0] * 20 + pairs[1]]
            np.testing.assert_allclose(found, expected, atol=1e-6, err_msg=name)
            pictures = ~np.isnan(np.asarray(part.pool(part.shape[1:])))
            np.testing.assert_array_equal(
                np.broadcast_to(seen.count, pictures.shape[:2]), pictures.sum(-1), err_msg=name
            )


def test_the_telling_head_is_induction_then_what_finds_something_then_a_place(exact):
    names = list(exact_heads())
    assert exact.telling().role == "induction"
    assert exact.telling().says == exact.says(0, names.index("induction"))
    among = [(0, names.index(name)) for name in ("first token", "self", "previous word")]
    assert exact.telling(among).role == "previous word"
    assert exact.telling(among[:2]).role == "self"
    assert exact.telling(among[:1]).role == "first token"
    with pytest.raises(ValueError, match="there is no head to choose from"):
        exact.telling([])


def test_one_head_is_opened_unscored_and_of_several_the_one_that_tells_most(monkeypatch):
    heads = exact_heads()
    recording = recording_of(np.stack([heads["first token"], heads["induction"]]), TEXT)
    assert place_to_open(recording) == (0, 1)
    assert place_to_open(recording, [(0, 0), (0, 1)]) == (0, 1)
    monkeypatch.setattr("regard.heads.head_scores", None)
    assert place_to_open(recording, [(0, 0)]) == (0, 0)
    assert place_to_open(recording_of(heads["self"][None], TEXT)) == (0, 0)


def test_of_a_long_text_a_head_that_sees_all_of_it_is_told_before_one_with_a_window():
    heads = exact_heads()
    narrow, wide = heads["induction"][None], heads["previous word"][None]
    layers = [
        recording_of(narrow, TEXT, window=(20, 0)).layers[0], recording_of(wide, TEXT).layers[0],
    ]  # fmt: skip
    scores = head_scores(Recording(TEXT, layers))
    assert scores.sees_all.tolist() == [[0], [1]]
    assert scores.telling().role == "previous word"


def test_scores_sort_and_become_columns(exact, monkeypatch):
    by = exact.sort("induction")
    assert by.table().splitlines()[1].split()[0] == f"L0H{list(exact_heads()).index('induction')}"
    columns = by.columns()
    assert columns["role"][0] == "induction"
    assert columns["induction"] == sorted(columns["induction"], reverse=True)
    least = exact.sort("entropy").columns()["entropy"]
    assert least == sorted(least)
    assert by.sort("layer").order == by.sort("layer", ascending=True).order == exact.order
    assert by.sort("layer", ascending=False).order == exact.order[::-1]
    assert {len(column) for column in columns.values()} == {len(exact_heads())}
    with pytest.raises(KeyError, match="there is no 'x'; there are 'previous token'"):
        exact.sort("x")
    monkeypatch.setitem(__import__("sys").modules, "pandas", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install pandas, or take"):
        exact.to_pandas()


def test_a_text_of_one_token_over_and_over_is_read_at_some_of_its_queries():
    reader = Reader(recording_of(np.ones((1, 600, 600)) / 600, ["a"] * 600))
    assert len(reader._patterns.queries) < 2**14 + 600 * 20
    scores = reader.layers()
    assert 0 < scores.counted[0, 0, scores.roles.index("same token")] < 200


def test_one_query_with_a_choice_is_too_few_to_be_called_even():
    first = np.array([[[1.0, 0.0], [1.0, 0.0]]])
    scores = head_scores(recording_of(first, ["<bos>", "a"]))
    assert scores["spread evenly"][0, 0] == pytest.approx(0.5)
    assert scores.role(0, 0) == ""
    assert scores.says(0, 0) == "L0H0 · too few queries to tell what it looks at, entropy 0.00 nats"
