"""Every step of a small attention, equal to the operator's."""

import re

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import regard
from regard._showing.steps import Steps, steps
from regard.recording import Layer, Recording
from small import OPTIONS, WORDS, journey, numbers, qkv


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@pytest.mark.parametrize("option", OPTIONS)
def test_each_option_gives_the_weights_and_output_of_attention(option):
    q, k, v = qkv()
    given_ = {option: OPTIONS[option]}
    output, weights = regard.attention(q, k, v, **given_, return_weights=True)
    found = steps(q, k, v, **given_)
    np.testing.assert_array_equal(found.output, output)
    np.testing.assert_array_equal(found.weights, weights[:])
    np.testing.assert_array_equal(found.masked == -np.inf, found.weights == 0)
    if option != "sinks":
        np.testing.assert_allclose(found.weights, softmax(found.masked), atol=1e-12)


def test_steps_follow_the_formula_one_after_another():
    q, k, v = qkv()
    bias, mask = OPTIONS["bias"], OPTIONS["mask"]
    found = steps(q, k, v, scale=0.5, softcap=2.0, bias=bias, mask=mask)
    k, v = k.repeat(2, 0), v.repeat(2, 0)
    scores = q @ k.swapaxes(-1, -2)
    np.testing.assert_allclose(found.scores, scores, atol=1e-12)
    np.testing.assert_allclose(found.scaled, scores * 0.5, atol=1e-12)
    capped = 2 * np.tanh(scores * 0.5 / 2)
    np.testing.assert_allclose(found.capped, capped, atol=1e-12)
    masked = np.where(mask, capped + bias, -np.inf)
    np.testing.assert_allclose(found.masked, masked, atol=1e-12)
    np.testing.assert_allclose(found.weights, softmax(masked), atol=1e-12)
    np.testing.assert_allclose(found.output, softmax(masked) @ v, atol=1e-12)


@settings(deadline=None, max_examples=80)
@given(st.data())
def test_all_options_together_agree_with_attention(data):
    chosen = data.draw(st.sets(st.sampled_from(sorted(OPTIONS))))
    dtype = data.draw(st.sampled_from([np.float16, np.float32, np.float64]))
    is_torch = data.draw(st.booleans())
    q, k, v = qkv(dtype=dtype)
    options = {name: OPTIONS[name] for name in chosen}
    if is_torch:
        q, k, v = map(torch.from_numpy, (q, k, v))
        options = {
            name: torch.from_numpy(x) if isinstance(x, np.ndarray) else x
            for name, x in options.items()
        }
    output, weights = regard.attention(q, k, v, **options, return_weights=True)
    found = steps(q, k, v, **options)
    assert type(found.output) is type(q)
    assert found.output.dtype == q.dtype
    assert found.weights.dtype == found.masked.dtype == weights.dtype
    np.testing.assert_array_equal(found.output, output)
    np.testing.assert_array_equal(found.weights, weights[:])
    sinks = np.asarray(OPTIONS["sinks"])[:, None, None] if "sinks" in chosen else -np.inf
    masked = np.asarray(found.masked, np.float64)
    seen = (masked > -np.inf).any(-1, keepdims=True)
    e, off = np.where(seen, np.exp(masked), 0), np.where(seen, np.exp(sinks), 1)
    np.testing.assert_allclose(found.weights, e / (e.sum(-1, keepdims=True) + off), atol=1e-4)


@pytest.mark.parametrize("leading", [(), (3,), (2, 3), (2, 2, 3)])
def test_leading_axes_stay(leading):
    q, k, v = (numbers(*leading, n, 4) for n in (3, 5, 5))
    found = steps(q, k, v, causal=True)
    assert found.scores.shape == found.masked.shape == found.weights.shape == (*leading, 3, 5)
    assert found.output.shape == (*leading, 3, 4)
    np.testing.assert_allclose(found.output, regard.attention(q, k, v, causal=True))


@pytest.mark.parametrize("lengths", [[5, 0], [2, 4]])
def test_each_batch_element_has_its_own_key_length(lengths):
    q, k, v = (x[None].repeat(2, 0) for x in qkv())
    found = steps(q, k, v, causal=True, key_lengths=np.array(lengths))
    output = regard.attention(q, k, v, causal=True, key_lengths=np.array(lengths))
    np.testing.assert_array_equal(found.output, output)
    np.testing.assert_array_equal(found.masked > -np.inf, found.weights > 0)


def test_a_query_that_sees_nothing_has_weights_and_output_zero():
    q, k, v = qkv()
    found = steps(q, k, v, causal=True, query_start=-1)
    assert (found.masked[:, 0] == -np.inf).all()
    assert not found.weights[:, 0].any()
    assert not found.output[:, 0].any()
    assert "nothing" in found.explain(0, 0, head=0)


def test_nan_in_a_hidden_key_or_value_is_not_seen():
    q, k, v = qkv()
    k[:, 4], v[:, 4] = np.nan, np.inf
    found = steps(q, k, v, key_lengths=4)
    assert np.isnan(found.scores[..., 4]).all()
    assert (found.masked[..., 4] == -np.inf).all()
    assert np.isfinite(found.output).all()


@pytest.mark.parametrize(("Lq", "Lk"), [(0, 3), (3, 0), (0, 0)])
def test_nothing_to_attend_with_or_to_has_steps_too(Lq, Lk):
    found = steps(*qkv(Lq=Lq, Lk=Lk), causal=True)
    assert found.weights.shape == (4, Lq, Lk)
    assert not found.output.any()
    assert str(found)
    assert found._repr_html_()
    assert steps(*qkv(Lq=Lq, Lk=Lk), dropout=0.5).dropped.shape == (4, Lq, Lk)


@pytest.mark.parametrize(
    ("dtype", "wide"),
    [
        (np.float16, "float32"),
        (ml_dtypes.bfloat16, "float32"),
        (np.float32, "float32"),
        (np.float64, "float64"),
    ],
)
def test_matrices_are_at_least_float32_and_the_output_of_the_query_s_type(dtype, wide):
    found = steps(*qkv(dtype=dtype), causal=True, softcap=3.0, dropout=0.5, seed=1)
    for name in ("scores", "scaled", "capped", "masked", "weights", "dropped"):
        assert getattr(found, name).dtype == wide, name
    assert found.output.dtype == dtype
    assert found.query.dtype == dtype
    projected = Steps.from_inputs(numbers(3, 4, dtype=dtype), numbers(4, 4, dtype=dtype))
    assert projected.query.dtype == projected.output.dtype == dtype


def test_tensors_give_tensors_with_a_gradient():
    q, k, v = (torch.from_numpy(x).requires_grad_() for x in qkv())
    found = steps(q, k, v, causal=True)
    found.output.sum().backward()
    assert v.grad is not None
    assert isinstance(found.weights, torch.Tensor)
    assert str(found)


def test_what_changes_nothing_is_the_step_before():
    found = steps(*qkv())
    assert found.masked is found.capped is found.scaled
    assert found.dropped is None
    assert found.inputs is None
    names = [table.name for table in found._tables()]
    assert names == ["query", "key", "value", "scores", "scaled", "weights", "output"]


def test_without_value_there_are_weights_and_no_output():
    q, k, _ = qkv()
    found = steps(q, k)
    assert found.output is None
    np.testing.assert_array_equal(found.weights, regard.AttentionWeights(q, k)[:])
    assert "output" not in str(found)
    assert "output" not in found.explain(0, 0, head=1)


def test_dropout_drops_what_attention_drops():
    q, k, v = qkv()
    found = steps(q, k, v, dropout=0.5, seed=7)
    np.testing.assert_array_equal(found.output, regard.attention(q, k, v, dropout=0.5, seed=7))
    np.testing.assert_allclose(found.dropped @ v.repeat(2, 0), found.output, atol=1e-12)
    np.testing.assert_allclose(found.weights.sum(-1), 1)
    kept = found.dropped > 0
    assert 0 < kept.mean() < 1
    np.testing.assert_allclose(found.dropped[kept], 2 * found.weights[kept])
    drawn = steps(*map(torch.from_numpy, (q, k, v)), dropout=0.5)
    np.testing.assert_allclose(
        drawn.dropped @ torch.from_numpy(v).repeat_interleave(2, 0), drawn.output, atol=1e-12
    )


# From inputs.


def test_left_out_projections_are_the_identity():
    x = numbers(6, 3)
    found = Steps.from_inputs(x)
    np.testing.assert_array_equal(found.query, x)
    np.testing.assert_allclose(found.output, regard.attention(x, x, x))
    assert found.inputs is x


def test_projections_multiply_from_the_right_and_add_their_bias():
    x, context = numbers(2, 3), numbers(4, 3, seed=1)
    w = [numbers(3, n, seed=n) for n in (5, 5, 2)]
    b = [numbers(n, seed=n) for n in (5, 5, 2)]
    found = Steps.from_inputs(x, *w, *b, context, softcap=3.0)
    q, k, v = x @ w[0] + b[0], context @ w[1] + b[1], context @ w[2] + b[2]
    for name, expected in (("query", q), ("key", k), ("value", v)):
        np.testing.assert_allclose(getattr(found, name), expected)
    np.testing.assert_allclose(found.output, regard.attention(q, k, v, softcap=3.0))
    assert found.context is context
    text = str(found)
    assert "query = inputs @ w_query + b_query" in text
    assert "value = context @ w_value + b_value" in text


def test_projections_of_several_heads_share_one_of_one():
    x = numbers(2, 4, 3)
    w_query, b_query, w_key = numbers(2, 3, 5), numbers(2, 5), numbers(3, 5, seed=1)
    found = Steps.from_inputs(x, w_query, w_key, b_query=b_query, causal=True)
    q = np.stack([x @ w_query[h] + b_query[h] for h in range(2)], 1)
    k, v = (x @ w_key)[:, None], x[:, None]
    np.testing.assert_allclose(found.output, regard.attention(q, k, v, causal=True))
    assert found.output.shape == (2, 2, 4, 3)


def test_algorithm_3_attends_from_one_token_to_its_context():
    """Seed 003, by its formula; the d_in of 10 but d_attn and d_out of their own."""
    current, context = np.ones(10), np.array([[2.0], [3.0], [4.0]]) * np.ones(10)
    w = np.arange(1.0, 11.0) * np.ones((10, 1))
    found = Steps.from_inputs(current, w, w, w, b_value=np.arange(10.0), context=context)
    np.testing.assert_array_equal(found.query, np.arange(10, 101, 10))
    np.testing.assert_array_equal(found.key[0], np.arange(20, 201, 20))
    np.testing.assert_array_equal(found.value[0], [20, 41, 62, 83, 104, 125, 146, 167, 188, 209])
    np.testing.assert_array_equal(found.scores, [77000, 115500, 154000])
    np.testing.assert_allclose(found.scaled, [24349.537983, 36524.306975, 48699.075967])
    np.testing.assert_array_equal(found.weights, [0, 0, 1])
    np.testing.assert_array_equal(found.output, found.value[2])
    assert found.output.shape == (10,)
    assert "48699" in found.explain(0, 2)


def test_one_query_has_no_length_axis():
    q, k, v = numbers(4), numbers(3, 4, seed=1), numbers(3, 2, seed=2)
    found = steps(q, k, v, tokens=["a", "b", "c"], query_tokens=["now"], softcap=2.0, dropout=0.1)
    assert found.scores.shape == found.masked.shape == found.dropped.shape == (3,)
    assert found.output.shape == (2,)
    np.testing.assert_allclose(found.weights, steps(q[None], k, v, softcap=2.0).weights[0])
    assert re.search(r"\n  now +\d", str(found))
    heads = Steps.from_inputs(q, numbers(2, 4, 4), context=k)
    assert heads.weights.shape == (2, 3)
    assert heads.output.shape == (2, 4)
    assert "query 0, key 1" in heads.explain(0, 1, head=1)
    alone = Steps.from_inputs(q)
    np.testing.assert_array_equal(alone.weights, [1])


# Seeds: the printed figures.


def test_variances_of_seed_000_show_why_the_scores_are_divided():
    q = np.array([
        [0.03076571, -0.66596084, -0.57981773, 0.78204297, -2.20486326, 0.26485014],
        [-0.67861224, 0.49590148, 0.13423506, -0.4223308, 0.7713341, -1.18389824],
        [2.0906267, 0.27694552, -1.1727269, 1.66930336, -0.14534764, 0.74502536],
        [-1.13411916, 1.13097436, -1.65952086, -2.06938392, 2.02277881, 0.37287297],
    ])  # fmt: skip
    k = np.array([
        [-1.22715745, 1.49918116, 0.89824522, -0.08052928, -2.21706475, -0.26191323],
        [0.71747107, 0.009494, -0.69504954, 0.02322563, -1.25806545, -0.11341351],
        [0.91258838, 1.11400796, 0.46615481, -0.170631, -0.17803358, -0.97992068],
        [1.05682361, 0.70185397, 0.62036256, -0.63105621, -0.80103572, -2.07085978],
    ])  # fmt: skip
    found = steps(q, k, causal=True)
    assert found.scores.var() == pytest.approx(4.089120011404893)
    assert found.scaled.var() == pytest.approx(0.6815200019008156)
    np.testing.assert_allclose(
        found.weights,
        [
            [1.0, 0.0, 0.0, 0.0],
            [0.67157673, 0.32842327, 0.0, 0.0],
            [0.06248665, 0.63146158, 0.30605177, 0.0],
            [0.18039292, 0.22436955, 0.39149539, 0.20374214],
        ],
        atol=5e-9,
    )
    text = str(found)
    assert "variance 1.341" in text  # of the query
    assert "variance 4.089" in text  # of the scores
    assert "variance 0.6815" in text  # of the scaled scores


def test_figures_of_seed_001_are_printed_as_it_prints_them():
    found = Steps.from_inputs(journey(), scale=1.0, tokens=WORDS)
    text = str(found)
    assert re.search(r"journey +0\.9544 +1\.4950 +1\.4754 +0\.8434 +0\.7070 +1\.0865", text)
    assert re.search(r"journey +0\.1385 +0\.2379 +0\.2333 +0\.1240 +0\.1082 +0\.1581", text)
    assert re.search(r"journey +0\.4419 +0\.6515 +0\.5683", text)
    torch.manual_seed(123)
    w = [torch.rand(3, 2) for _ in range(3)]
    second = Steps.from_inputs(journey()[2], *w, context=journey())
    assert [f"{x:.4f}" for x in second.scores] == [
        "1.2544", "1.8284", "1.7877", "1.0654", "0.5508", "1.5238",
    ]  # fmt: skip
    assert [f"{x:.4f}" for x in second.output] == ["0.3058", "0.8203"]


# Errors.


X = numbers(4, 3)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: steps(X, X, X, return_weights=True),
            TypeError,
            "no option 'return_weights'. There are",
        ),
        (
            lambda: steps(X, X, X, backend="torch"),
            TypeError,
            "no option 'backend'. There are causal",
        ),
        (
            lambda: steps(X, X, X, is_causal=True),
            TypeError,
            "no option 'is_causal'. Here it is causal=True",
        ),
        (lambda: steps([1.0], X, X), TypeError, "query is a builtins.list"),
        (lambda: steps(X.astype(int), X, X), TypeError, "query is int64; floating numbers"),
        (lambda: steps(X, numbers(4, 2), X), regard.ShapeError, "one size D"),
        (lambda: steps(X, X, X, tokens=[*"abc", 3]), TypeError, r"tokens\[3\] is an int; a str is"),
        (lambda: steps(X, X, X, tokens=["a"]), regard.ShapeError, "tokens is 1 text; a list of 4"),
        (
            lambda: steps(X, X, X, tokens="abcd"),
            regard.ShapeError,
            "tokens is one str; a list of 4",
        ),
        (
            lambda: steps(X, X, X, query_tokens=["a"]),
            regard.ShapeError,
            "query_tokens is 1 text; a list of 4 is needed, one per query",
        ),
        (lambda: Steps.from_inputs([1.0]), TypeError, "x is list; a NumPy array or torch tensor"),
        (lambda: Steps.from_inputs(None), TypeError, "x is NoneType"),
        (lambda: Steps.from_inputs(X.astype(int)), TypeError, r"x is int64; .* x\.astype\("),
        (
            lambda: Steps.from_inputs(X, numbers(3, 2, dtype=np.float32)),
            TypeError,
            "x is NumPy float64 and w_query is NumPy float32; all must be of one library",
        ),
        (
            lambda: Steps.from_inputs(X, context=torch.ones(2, 3).double()),
            TypeError,
            "x is NumPy float64 and context is torch float64",
        ),
        (
            lambda: Steps.from_inputs(X, numbers(2, 3)),
            regard.ShapeError,
            r"vectors of 3 numbers in inputs, but w_query \(2, 3\) takes 2; it is applied as",
        ),
        (
            lambda: Steps.from_inputs(X, w_value=numbers(2, 3), context=X),
            regard.ShapeError,
            r"in context, but w_value",
        ),
        (
            lambda: Steps.from_inputs(X, b_key=numbers(2)),
            regard.ShapeError,
            r"b_key \(2,\) is added to vectors of 3 numbers; \(3,\) is needed",
        ),
        (
            lambda: Steps.from_inputs(X, numbers(2, 3, 3), b_query=numbers(4, 3)),
            regard.ShapeError,
            r"b_query \(4, 3\) is added .* one such row per head of w_query",
        ),
        (
            lambda: Steps.from_inputs(X, *3 * [numbers(3, 5)], *3 * [numbers(3, 5)]),
            regard.ShapeError,
            r"b_query \(3, 5\) is added .* \(5,\) is needed, or one such row per head",
        ),
        (
            lambda: Steps.from_inputs(X, numbers(3)),
            regard.ShapeError,
            r"w_query \(3,\) has 1 axis; 2, 3 are possible",
        ),
        (lambda: Steps.from_inputs(X, context=X[0]), regard.ShapeError, "context .* has 1 axis"),
    ],
)
def test_what_has_no_steps_is_said(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    ("name", "index"),
    [
        ("query", (1.0, 0, 0)), ("key", (0, "1", 0)), ("query", (True, 0, 0)),
        ("head", (0, 0, 0.0)), ("head", (0, 0, (None,))),
    ],
)  # fmt: skip
def test_an_index_of_a_cell_that_is_no_int_is_told(name, index):
    found = regard.steps(*(numbers(2, 3, 4, seed=n) for n in range(3)))
    *cell, head = index
    for explained in (found, found.backward(numbers(2, 3, 4))):
        with pytest.raises(TypeError, match=rf"explain: {name} is a \w+; an int is needed"):
            explained.explain(*cell, head=head)
        assert "query 1, key 2" in explained.explain(np.int64(1), np.int32(2), head=np.int64(0))


def test_too_much_to_write_out_is_refused_before_it_is_computed():
    x = np.zeros((1, 100_000, 1), np.float32)
    with pytest.raises(regard.MaterializeError) as caught:
        steps(x, x, x, causal=True)
    message = str(caught.value)
    assert "(4, 1, 1, 100000, 100000) float32 is 160.0 GB, limit 2.0 GB" in message
    assert "one head and a part of the text" in message
    assert "regard.limits(weights_bytes=...)" in message


def test_the_limit_counts_every_matrix_and_can_be_moved():
    q, k, v = (x[:1] for x in qkv(Lq=5))
    with regard.limits(weights_bytes=3 * 200), pytest.raises(regard.MaterializeError):
        steps(q, k[:1], v[:1], causal=True)
    with regard.limits(weights_bytes=4 * 200):
        steps(q, k[:1], v[:1], causal=True)
        with pytest.raises(regard.MaterializeError):
            steps(q, k[:1], v[:1], causal=True, dropout=0.5)


# From a recording.


def test_steps_of_a_recording_are_those_of_one_head():
    q, k, v = qkv(Lq=5, dtype=np.float32)
    options = {
        "causal": True,
        "sinks": numbers(4, dtype=np.float32),
        "bias": numbers(4, 1, 5, dtype=np.float32),
        "mask": np.tri(5, dtype=bool)[None],
        "segments": np.array([0, 0, 0, 1, 1]),
        "key_lengths": 5,
        "window": (3, 0),
    }
    recording = Recording(WORDS[:5], [Layer(q, k, v, **options)])
    for head in (0, 1, 2, 3, -1):
        found = recording.steps(0, head)
        np.testing.assert_allclose(found.weights, recording.weights[0][head], atol=1e-6)
        np.testing.assert_array_equal(found.query, q[head])
        np.testing.assert_array_equal(found.key, k[head // 2])
        assert found.tokens == found.query_tokens == tuple(WORDS[:5])
    for wrong in ((1, 0), (0, 4), (0, -5)):
        with pytest.raises(IndexError, match="there are"):
            recording.steps(*wrong)
    assert Recording(WORDS[:5], [Layer(q, k)]).steps(0, 0).output is None
