"""What the scores of heads mean."""

import numpy as np
import pytest

from regard.heads import HeadScores, Reader, head_scores
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
