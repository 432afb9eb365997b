"""The five documents that regard grew from: their printed numbers, and where they are wrong.

Figures are quoted from seeds 000 to 004. What they drew at random and did not print cannot be
computed again; of that, shapes and sums are held.
"""

import re

import numpy as np
import pytest
import torch
from torch import nn

import regard
import regard.nn
from bounds import assert_attends
from regard.lm import WordTokenizer


def numbers(text):
    """A printed number, row or matrix."""
    rows = re.findall(r"\[([^\[\]]*)\]", text)
    parsed = [[float(n) for n in re.findall(r"-?(?:inf|\d+\.?\d*)", row)] for row in rows]
    return np.array(parsed[0] if len(parsed) == 1 else parsed or float(text))


def assert_prints(actual, text, inputs_move_it=0.0):
    """Rounds to the printed digits; whole numbers are met exactly.

    Args:
        inputs_move_it: what the rounding of printed inputs can add.
    """
    printed = numbers(text)
    actual = np.asarray(actual, np.float64)
    assert actual.shape == printed.shape
    assert np.array_equal(np.isinf(actual), np.isinf(printed))
    digits = max(map(len, re.findall(r"\.(\d+)", text)), default=None)
    half_of_the_last = 0.0 if digits is None else 0.5000001 * 10.0**-digits
    finite = np.isfinite(printed)
    error = np.abs(actual[finite] - printed[finite]).max()
    assert error <= half_of_the_last + inputs_move_it, error


def test_a_number_that_is_off_in_its_last_digit_is_noticed():
    assert_prints([0.12344, -3.0], "[0.1234, -3.0000]")
    for off in ([0.1235, -3.0], [0.1233, -3.0], [0.1234, 3.0], [0.1234, -np.inf], [0.1234]):
        with pytest.raises(AssertionError):
            assert_prints(off, "[0.1234, -3.0000]")


# --- 000: NumPy, from q, k and v to the output -------------------------------------------------

QUERY = numbers("""
 [[ 0.03076571 -0.66596084 -0.57981773  0.78204297 -2.20486326  0.26485014]
 [-0.67861224  0.49590148  0.13423506 -0.4223308   0.7713341  -1.18389824]
 [ 2.0906267   0.27694552 -1.1727269   1.66930336 -0.14534764  0.74502536]
 [-1.13411916  1.13097436 -1.65952086 -2.06938392  2.02277881  0.37287297]]""")
KEY = numbers("""
 [[-1.22715745  1.49918116  0.89824522 -0.08052928 -2.21706475 -0.26191323]
 [ 0.71747107  0.009494   -0.69504954  0.02322563 -1.25806545 -0.11341351]
 [ 0.91258838  1.11400796  0.46615481 -0.170631   -0.17803358 -0.97992068]
 [ 1.05682361  0.70185397  0.62036256 -0.63105621 -0.80103572 -2.07085978]]""")
VALUE = numbers("""
 [[-0.48742851  1.76485745  0.36118831  0.84109156  1.64645719  2.49370612]
 [-0.41495437 -0.82550919 -1.8979914   1.13401928 -0.17321176 -0.39958629]
 [-0.86078293  0.08485973  0.13252766  0.6324223   0.25428529 -0.25960824]
 [-1.01291217  0.73806086  0.21143847 -0.17391314 -1.78605033 -0.59720633]]""")
SCORES = """
 [[ 3.19901068,  3.18074107, -0.98452726, -0.07039688],
 [ 0.33077719, -1.4214042 ,  1.09058459,  1.81448694],
 [-3.21104763,  2.45482831,  0.68070498, -0.80355552],
 [-2.81902441, -2.28465071, -0.92107062, -2.52087782]]"""
SCALED = """
 [[ 1.30599064  1.29853211 -0.40193157 -0.0287394 ]
 [ 0.13503922 -0.58028584  0.4452293   0.74076119]
 [-1.31090471  1.00217946  0.27789664 -0.32805017]
 [-1.1508619  -0.93270475 -0.3760255  -1.02914406]]"""
MASKED = """
 [[ 1.30599064,        -inf,        -inf,        -inf],
 [ 0.13503922, -0.58028584,        -inf,        -inf],
 [-1.31090471,  1.00217946,  0.27789664,        -inf],
 [-1.1508619 , -0.93270475, -0.3760255 , -1.02914406]]"""
WEIGHTS = """
 [[1.        , 0.        , 0.        , 0.        ],
 [0.67157673, 0.32842327, 0.        , 0.        ],
 [0.06248665, 0.63146158, 0.30605177, 0.        ],
 [0.18039292, 0.22436955, 0.39149539, 0.20374214]]"""
OUTPUT = """
 [[-0.48742851  1.76485745  0.36118831  0.84109156  1.64645719  2.49370612]
 [-0.46362631  0.91412078 -0.38077887  0.93729584  1.04883557  1.54348157]
 [-0.55592966 -0.38502584 -1.13537887  0.96220057  0.07132949 -0.17595361]
 [-0.72439722  0.31674494 -0.26573278  0.61832334 -0.00619643  0.1368804 ]]"""
# Half a unit of the eighth digit in each of q and k, over a row of each: at most
# 0.5e-8 * (7.3 + 6.2) in a score; later stages move less.
ROUNDED = 7e-8


def test_000_every_stage_has_its_printed_numbers():
    steps = regard.steps(QUERY, KEY, VALUE, causal=True)
    assert_prints(steps.scores, SCORES, ROUNDED)
    assert_prints(steps.scaled, SCALED, ROUNDED)
    assert_prints(steps.masked, MASKED, ROUNDED)
    assert_prints(steps.weights, WEIGHTS, ROUNDED)
    assert_prints(steps.output, OUTPUT, ROUNDED)


def test_000_the_operator_and_its_weights_have_the_printed_numbers():
    output, weights = regard.attention(QUERY, KEY, VALUE, causal=True, return_weights=True)
    assert_prints(output, OUTPUT, ROUNDED)
    assert_prints(np.asarray(weights), WEIGHTS, ROUNDED)
    assert output.shape == (4, 6)
    assert weights.shape == (4, 4)


def test_000_dividing_by_the_root_of_d_brings_the_variance_down():
    steps = regard.steps(QUERY, KEY, VALUE)
    assert_prints(steps.query.var(), "1.341162827829847", 1e-8)
    assert_prints(steps.key.var(), "0.936821161732119", 1e-8)
    assert_prints(steps.scores.var(), "4.089120011404893", 1e-8)
    assert_prints(steps.scaled.var(), "0.6815200019008156", 1e-8)
    assert steps.scores.var() / steps.scaled.var() == pytest.approx(6)  # d_k


def test_000_the_mask_is_a_triangle_of_ones_and_then_of_minus_infinity():
    steps = regard.steps(QUERY, KEY, VALUE, causal=True)
    allowed = numbers("[[1. 0. 0. 0.] [1. 1. 0. 0.] [1. 1. 1. 0.] [1. 1. 1. 1.]]")
    added = """[[  0., -inf, -inf, -inf], [  0.,   0., -inf, -inf],
                [  0.,   0.,   0., -inf], [  0.,   0.,   0.,   0.]]"""
    assert_prints(steps.masked - steps.scaled, added)
    for how in ({"mask": allowed == 1}, {"bias": numbers(added)}):
        assert_prints(regard.attention(QUERY, KEY, VALUE, **how), OUTPUT, ROUNDED)


@pytest.mark.parametrize("batch", [(), (8,)])
def test_000_projections_have_the_shapes_of_the_paper(batch):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((5, 512))
    w_query, w_key, w_value = rng.standard_normal((3, 512, 64)) / 512**0.5
    steps = regard.Steps.from_inputs(x, w_query, w_key, w_value)
    assert steps.query.shape == steps.key.shape == steps.value.shape == (5, 64)
    assert steps.scores.shape == steps.weights.shape == (5, 5)
    assert steps.output.shape == (5, 64)
    many = np.broadcast_to(x, (*batch, 5, 512))
    output = regard.attention(many @ w_query, many @ w_key, many @ w_value)
    assert output.shape == (*batch, 5, 64)
    assert np.allclose(output, steps.output)


def test_000_attention_without_parameters_has_one_result_for_one_input():
    steps = regard.Steps.from_inputs(QUERY)
    assert np.array_equal(steps.query, QUERY)
    assert np.array_equal(steps.value, QUERY)
    assert np.allclose(steps.output, regard.attention(QUERY, QUERY, QUERY))


def test_000_is_wrong_where_a_formula_has_no_sum_over_the_keys():
    # softmax(...) x_j for one j is one weighted vector, not their sum: it depends on j.
    steps = regard.Steps.from_inputs(QUERY)
    one_j = steps.weights[0, 1] * QUERY[1]
    assert not np.allclose(one_j, steps.output[0])
    assert np.allclose(sum(steps.weights[0, j] * QUERY[j] for j in range(4)), steps.output[0])


def test_000_is_wrong_where_its_overview_sums_scores_that_are_no_weights():
    steps = regard.Steps.from_inputs(QUERY)
    assert not np.allclose(steps.scores @ QUERY, steps.output)


def test_000_uses_a_name_that_numpy_2_has_not():
    assert not hasattr(np, "infty")


def test_000_has_a_softmax_that_overflows_where_attention_does_not():
    with np.errstate(all="ignore"):
        plain = np.exp(1e3 * QUERY @ KEY.T)
        assert np.isnan(plain / plain.sum(-1, keepdims=True)).any()
    weights = np.asarray(regard.AttentionWeights(QUERY, KEY, scale=1e3))
    assert np.allclose(weights.sum(-1), 1, atol=1e-6)


def test_000_has_transposes_that_refuse_the_batches_it_speaks_of():
    batch = np.exp(np.stack([QUERY, QUERY, QUERY]))  # (N, T, d_k)
    with pytest.raises(ValueError, match="broadcast"):
        (batch.T / batch.sum(-1)).T  # noqa: B018
    with pytest.raises(ValueError, match="mismatch in its core dimension"):
        np.matmul(batch, batch.T)
    assert regard.attention(batch, batch, batch).shape == batch.shape


# --- 001: torch, six words ---------------------------------------------------------------------

INPUTS = torch.tensor(
    [
        [0.43, 0.15, 0.89],  # Your
        [0.55, 0.87, 0.66],  # journey
        [0.57, 0.85, 0.64],  # starts
        [0.22, 0.58, 0.33],  # with
        [0.77, 0.25, 0.10],  # one
        [0.05, 0.80, 0.55],  # step
    ]
)
SCORES_001 = """
 [[0.9995, 0.9544, 0.9422, 0.4753, 0.4576, 0.6310],
 [0.9544, 1.4950, 1.4754, 0.8434, 0.7070, 1.0865],
 [0.9422, 1.4754, 1.4570, 0.8296, 0.7154, 1.0605],
 [0.4753, 0.8434, 0.8296, 0.4937, 0.3474, 0.6565],
 [0.4576, 0.7070, 0.7154, 0.3474, 0.6654, 0.2935],
 [0.6310, 1.0865, 1.0605, 0.6565, 0.2935, 0.9450]]"""
WEIGHTS_001 = """
 [[0.2098, 0.2006, 0.1981, 0.1242, 0.1220, 0.1452],
 [0.1385, 0.2379, 0.2333, 0.1240, 0.1082, 0.1581],
 [0.1390, 0.2369, 0.2326, 0.1242, 0.1108, 0.1565],
 [0.1435, 0.2074, 0.2046, 0.1462, 0.1263, 0.1720],
 [0.1526, 0.1958, 0.1975, 0.1367, 0.1879, 0.1295],
 [0.1385, 0.2184, 0.2128, 0.1420, 0.0988, 0.1896]]"""
CONTEXT_001 = """
 [[0.4421, 0.5931, 0.5790],
 [0.4419, 0.6515, 0.5683],
 [0.4431, 0.6496, 0.5671],
 [0.4304, 0.6298, 0.5510],
 [0.4671, 0.5910, 0.5266],
 [0.4177, 0.6503, 0.5645]]"""
LAYER_001 = """
 [[0.2996, 0.8053],
 [0.3061, 0.8210],
 [0.3058, 0.8203],
 [0.2948, 0.7939],
 [0.2927, 0.7891],
 [0.2990, 0.8040]]"""


def drawn_001():
    """W_query, W_key and W_value, (3, 2) each, as the document draws them."""
    torch.manual_seed(123)
    return torch.rand(3, 2), torch.rand(3, 2), torch.rand(3, 2)


def test_001_one_query_of_raw_scores():
    steps = regard.steps(INPUTS[1:2], INPUTS, INPUTS, scale=1.0)
    assert_prints(steps.scores[0], "[0.9544, 1.4950, 1.4754, 0.8434, 0.7070, 1.0865]")
    assert_prints(steps.weights[0], "[0.1385, 0.2379, 0.2333, 0.1240, 0.1082, 0.1581]")
    assert_prints(steps.weights.sum(), "1.0000")  # printed as 1.
    assert_prints(steps.output[0], "[0.4419, 0.6515, 0.5683]")


@pytest.mark.parametrize("convert", [torch.Tensor.clone, torch.Tensor.numpy])
def test_001_all_queries_of_raw_scores(convert):
    x = convert(INPUTS)
    steps = regard.Steps.from_inputs(x, scale=1.0)
    assert_prints(steps.scores, SCORES_001)
    assert_prints(steps.weights, WEIGHTS_001)
    assert_prints(steps.output, CONTEXT_001)
    output, weights = regard.attention(x, x, x, scale=1.0, return_weights=True)
    assert_prints(output, CONTEXT_001)
    assert_prints(np.asarray(weights), WEIGHTS_001)


def test_001_one_query_through_projections():
    w_query, w_key, w_value = drawn_001()
    one = regard.Steps.from_inputs(INPUTS[2:3], w_query, w_key, w_value, context=INPUTS)
    assert_prints(one.query[0], "[0.4300, 1.4343]")
    assert one.key.shape == one.value.shape == (6, 2)
    assert_prints(one.scores[0], "[1.2544, 1.8284, 1.7877, 1.0654, 0.5508, 1.5238]")
    assert_prints(one.weights[0], "[0.1503, 0.2256, 0.2192, 0.1315, 0.0914, 0.1819]")
    assert_prints(one.output[0], "[0.3058, 0.8203]")


def test_001_a_trained_layer_moves_over_to_the_same_numbers():
    layer = nn.Module()
    for name, w in zip(("W_query", "W_key", "W_value"), drawn_001(), strict=True):
        layer.register_parameter(name, nn.Parameter(w))
    moved = regard.nn.SelfAttention.from_module(layer)
    assert_prints(moved(INPUTS).detach(), LAYER_001)
    steps = regard.Steps.from_inputs(INPUTS, *drawn_001())
    assert_prints(steps.output, LAYER_001)


def test_001_is_wrong_where_it_calls_the_third_word_the_second():
    # x_2 is inputs[2], "starts"; the query used before was inputs[1], "journey". Its score with
    # itself, called 22, stands third among the six.
    w_query, w_key, w_value = drawn_001()
    steps = regard.Steps.from_inputs(INPUTS, w_query, w_key, w_value)
    assert_prints(steps.scores[2, 2], "1.7877")
    assert abs(steps.scores[1, 1] - 1.7877) > 0.01


# --- 002: batches in two products, and why ----------------------------------------------------


def batch_002():
    return torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0))  # (b, t, k)


def two_products(x):
    """The document's basic operation, with the function that torch has."""
    return torch.bmm(torch.softmax(torch.bmm(x, x.mT), dim=2), x)


def test_002_attention_is_two_matrix_products_over_a_batch():
    x = batch_002()
    found = regard.attention(x, x, x, scale=1.0)
    torch.testing.assert_close(found, two_products(x))
    assert_attends(found[:, None], *[x[:, None]] * 3, scale=1.0)


def test_002_a_vector_has_three_roles_that_projections_tell_apart():
    x, (w_query, w_key, w_value) = batch_002()[0], torch.randn(3, 8, 8)
    steps = regard.Steps.from_inputs(x, w_query, w_key, w_value)
    for i in range(5):
        query = x[i] @ w_query
        raw = torch.stack([query @ (x[j] @ w_key) for j in range(5)]) / 8**0.5
        mean = sum(w * (x[j] @ w_value) for j, w in enumerate(torch.softmax(raw, 0)))
        assert torch.allclose(steps.output[i], mean, rtol=1e-4, atol=1e-4)


def test_002_several_heads_are_several_sets_of_three_matrices():
    x, w = batch_002(), torch.randn(3, 4, 8, 2)  # query/key/value, heads, k, k / heads
    apart = [regard.attention(x @ w[0, h], x @ w[1, h], x @ w[2, h]) for h in range(4)]
    query, key, value = x[:, None] @ w.unsqueeze(1)  # (b, heads, t, 2) each
    together = regard.attention(query, key, value)
    assert torch.allclose(together, torch.stack(apart, 1), atol=1e-6)


def test_002_is_wrong_where_it_calls_torch_bnm():
    assert not hasattr(torch, "bnm")
    assert callable(torch.bmm)
    with pytest.raises(SyntaxError):
        compile("import torch<br>", "002", "exec")


def test_002_is_wrong_where_it_writes_a_sigmoid_for_the_exponential():
    x = batch_002()
    raw = torch.bmm(x, x.mT)
    as_written = torch.sigmoid(raw) / torch.sigmoid(raw).sum(2, keepdim=True)
    weights = torch.as_tensor(np.asarray(regard.AttentionWeights(x, x, scale=1.0)))
    assert torch.allclose(as_written.sum(2), weights.sum(2))
    assert not torch.allclose(as_written, weights, atol=0.1)


def test_002_is_wrong_where_it_averages_x_i_and_not_x_j():
    x = batch_002()
    weights = torch.as_tensor(np.asarray(regard.AttentionWeights(x, x)))
    as_written = torch.einsum("bij,bik->bik", weights, x)
    assert torch.allclose(as_written, x, atol=1e-5)  # weights sum to one: nothing is computed
    assert not torch.allclose(regard.attention(x, x, x), x, atol=0.1)


def test_002_is_wrong_where_it_says_that_the_average_dot_product_grows_with_k():
    # The mean stays 0; the spread grows, with the root of k, and that root is divided by.
    rng = np.random.default_rng(0)
    for k in (16, 256):
        q, key = rng.standard_normal((2, 400, k))
        steps = regard.steps(q, key, key)
        assert abs(steps.scores.mean()) < 0.02 * k
        assert steps.scores.std() == pytest.approx(k**0.5, rel=0.05)
        assert steps.scaled.std() == pytest.approx(1, rel=0.05)


def test_002_is_wrong_where_it_multiplies_the_transposed_queries_with_the_keys():
    # Vectors are its rows, so Q^T K would compare the k numbers of a vector, not the t vectors.
    x = batch_002()
    assert (x.mT @ x).shape == (3, 8, 8)
    assert regard.AttentionWeights(x, x).shape == (3, 5, 5)


def test_002_is_wrong_where_the_output_has_size_b_y_k():
    x = batch_002()
    assert regard.attention(x, x, x).shape == (3, 5, 8)  # (b, t, k), as the input


# --- 003: one current token and its context, Algorithm 3 ----------------------------------------

CURRENT = np.ones(10)
CONTEXT = np.array([[2.0], [3.0], [4.0]]) * np.ones((1, 10))
ROWS = np.arange(1.0, 11.0)[:, None] * np.ones((1, 10))  # W[i] is i + 1 everywhere
KEYS = """
 [[ 20,  40,  60,  80, 100, 120, 140, 160, 180, 200],
 [ 30,  60,  90, 120, 150, 180, 210, 240, 270, 300],
 [ 40,  80, 120, 160, 200, 240, 280, 320, 360, 400]]"""
VALUES = """
 [[ 20,  41,  62,  83, 104, 125, 146, 167, 188, 209],
 [ 30,  61,  92, 123, 154, 185, 216, 247, 278, 309],
 [ 40,  81, 122, 163, 204, 245, 286, 327, 368, 409]]"""
ALPHAS = "[24349.5379833 , 36524.30697494, 48699.07596659]"


def steps_003(b_value=0.0, dtype=np.float64):
    zero = np.zeros(10)
    arrays = {
        "x": CURRENT, "w_query": ROWS.T, "w_key": ROWS.T, "w_value": ROWS.T, "context": CONTEXT,
        "b_query": zero, "b_key": zero, "b_value": zero + b_value,
    }  # fmt: skip
    return regard.Steps.from_inputs(**{name: a.astype(dtype) for name, a in arrays.items()})


def test_003_query_keys_and_scores_have_the_printed_numbers():
    steps = steps_003()
    assert_prints(steps.query, "[ 10,  20,  30,  40,  50,  60,  70,  80,  90, 100]")
    assert_prints(steps.key, KEYS)
    assert_prints(steps.scaled, ALPHAS)
    assert_prints(steps.scaled[0], "24349.53798329652")
    assert steps.output.shape == (10,)


def test_003_the_values_printed_need_a_bias_that_its_code_does_not_give():
    assert_prints(steps_003(b_value=np.arange(10)).value, VALUES)
    assert_prints(steps_003().value, KEYS)  # with its bias of zero, values are as the keys


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_003_scores_of_48699_give_exact_weights_without_overflow(dtype):
    steps = steps_003(b_value=np.arange(10), dtype=dtype)
    exactly = [0, 0, 1]  # the next weight is exp(-12174)
    assert np.array_equal(steps.weights, exactly)
    assert np.array_equal(steps.output, steps.value[2])
    output, weights = regard.attention(
        steps.query[None], steps.key, steps.value, return_weights=True
    )
    assert np.array_equal(output[0], steps.output)
    assert np.array_equal(weights[0], exactly)


def test_003_is_wrong_where_its_softmax_forgets_the_exponential():
    steps = steps_003()
    shares = steps.scaled / steps.scaled.sum()
    assert shares.sum() == pytest.approx(1.0)  # as it prints, and as any division by the sum has
    assert np.allclose(shares, [2 / 9, 3 / 9, 4 / 9])
    assert not np.allclose(shares, steps.weights, atol=0.2)


def test_003_is_wrong_where_it_adds_the_query_bias_to_keys_and_values():
    # b_q has d_attn numbers; values have d_out. Where the two differ it does not fit.
    rng = np.random.default_rng(0)
    x, context = rng.standard_normal(5), rng.standard_normal((3, 5))  # d_in = 5
    projections = {
        "w_query": rng.standard_normal((5, 4)), "w_key": rng.standard_normal((5, 4)),
        "w_value": rng.standard_normal((5, 7)), "b_query": np.ones(4), "b_key": np.zeros(4),
        "context": context,
    }  # fmt: skip
    with pytest.raises(regard.ShapeError):
        regard.Steps.from_inputs(x, **projections, b_value=projections["b_query"])
    steps = regard.Steps.from_inputs(x, **projections, b_value=np.ones(7))
    assert steps.value.shape == (3, 7)  # v_t has d_out numbers, not d_attn as the document says
    assert steps.output.shape == (7,)
    # For keys it fits, and adds the same to every score of a query: the weights stay.
    shifted = regard.Steps.from_inputs(x, **projections | {"b_key": np.ones(4)})
    assert np.allclose(shifted.weights, steps.weights)
    assert not np.allclose(shifted.scores, steps.scores)


def test_003_is_wrong_where_a_weight_matrix_ignores_its_input_size():
    # Its generator makes (out, out) of (in, out); ten everywhere hides it.
    d_in, d_attn = 5, 10
    square = np.ones((d_attn, d_attn))
    with pytest.raises(regard.ShapeError):
        regard.Steps.from_inputs(np.ones(d_in), square.T, square.T)


# --- 004: words, embedding, one head, several heads ---------------------------------------------

TEXT = "How are you doing ? I am good and you ? I am fine, thank you ."
# The document numbers a set, whose order is another in every run; this is the one it printed.
PRINTED_ORDER = "how thank ? are and doing good fine, am you i ."
SENTENCE = "How are you doing ?"
EMBEDDED = """
 [[ 0.5221,  0.7157, -0.3543, -0.5256,  0.1637, -0.0708, -0.0091,
    1.0332, -1.3994,  3.2293,  0.3880,  1.6749],
 [-0.3050,  0.1364,  0.5668, -0.1816,  3.0615, -0.6120,  1.1956,
  -0.5862,  0.6557,  0.8610, -0.2304, -0.8637],
 [ 1.7445, -0.2422,  1.5841,  0.6004, -0.7200, -0.1400,  0.5470,
   0.0795,  1.4277, -2.1220,  0.0203, -0.0942],
 [ 0.5990, -0.2254, -0.3385,  0.4682,  0.3350, -1.9881,  0.5771,
  -1.4849,  0.3929,  3.1484, -1.7804,  0.1608],
 [-1.6338,  1.6158, -0.2962, -0.2781,  0.7622,  0.8868, -1.0893,
  -0.0453, -0.1252, -0.2076,  0.1610,  0.3798]]"""
WEIGHTS_004 = """
 [[0.1559, 0.1356, 0.2756, 0.2237, 0.2092],
 [0.2023, 0.1844, 0.2509, 0.1668, 0.1955],
 [0.1155, 0.2493, 0.1633, 0.1428, 0.3291],
 [0.3623, 0.1713, 0.1715, 0.2217, 0.0732],
 [0.1743, 0.1350, 0.2164, 0.2106, 0.2637]]"""


def test_004_words_have_their_printed_numbers_and_the_sentence_comes_back():
    words = WordTokenizer(PRINTED_ORDER)
    assert words.words[:4] == ["BOS", "EOS", "how", "thank"]
    assert words.encode(SENTENCE) == [2, 5, 11, 7, 4]
    assert words.decode([2, 5, 11, 7, 4]) == SENTENCE
    assert len(words) == 14


def test_004_the_whole_text_has_the_same_words():
    words = WordTokenizer(TEXT)
    assert len(words) == 14
    assert set(words.words) == set(WordTokenizer(PRINTED_ORDER).words)
    assert words.decode(words.encode(SENTENCE, bos=True, eos=True)) == SENTENCE


def test_004_is_random_where_it_numbers_a_set():
    # Ours are numbered as they appear, so that a model can be kept.
    assert WordTokenizer(TEXT).encode(SENTENCE) == [2, 3, 4, 5, 6]


def test_004_makes_marks_of_begin_and_end_that_it_never_uses():
    words = WordTokenizer(TEXT)
    assert words.encode(SENTENCE, bos=True, eos=True) == [0, 2, 3, 4, 5, 6, 1]
    with pytest.raises(ValueError, match="unknown word 'bos'"):
        words.encode("BOS")  # a mark is no word of a text


def test_004_one_head_keeps_the_batch_and_its_length():
    embedded = torch.tensor(numbers(EMBEDDED), dtype=torch.float32)[None]
    assert embedded.shape == (1, 5, 12)
    layer = regard.nn.SelfAttention(12, 12, bias=True)
    output, weights = layer(embedded, return_weights=True)
    assert output.shape == (1, 5, 12)
    assert weights.shape[-2:] == (5, 5)
    assert torch.allclose(torch.as_tensor(np.asarray(weights)).sum(-1), torch.ones(1), atol=1e-6)


def test_004_one_head_moves_over_to_the_same_numbers():
    torch.manual_seed(0)
    theirs = nn.ModuleDict({name: nn.Linear(12, 12) for name in "QKV"})
    holder = nn.Module()
    holder.Q, holder.K, holder.V = theirs["Q"], theirs["K"], theirs["V"]
    x = torch.tensor(numbers(EMBEDDED), dtype=torch.float32)[None]
    scores = torch.bmm(holder.Q(x), holder.K(x).mT) * 12**-0.5
    expected = torch.bmm(torch.softmax(scores, -1), holder.V(x))
    assert torch.allclose(regard.nn.SelfAttention.from_module(holder)(x), expected, atol=1e-6)


def test_004_printed_rows_of_weights_sum_to_one_and_come_back_from_their_logarithm():
    printed = numbers(WEIGHTS_004)
    assert np.abs(printed.sum(-1) - 1).max() <= 5 * 0.5e-4
    nothing = np.zeros((5, 1))
    weights = regard.AttentionWeights(nothing, nothing, bias=np.log(printed))
    assert_prints(np.asarray(weights), WEIGHTS_004, inputs_move_it=1e-4)


def multi_head_004():
    """Parameters as the document's class has them: 12 numbers, 3 heads of 4, one product."""
    module = nn.Module()
    module.c_attn, module.c_proj = nn.Linear(12, 36), nn.Linear(12, 12)
    return module


def test_004_several_heads_move_over_to_the_same_numbers():
    torch.manual_seed(0)
    theirs, x = multi_head_004(), torch.randn(2, 5, 12)
    q, k, v = (part.view(2, 5, 3, 4).transpose(1, 2) for part in theirs.c_attn(x).chunk(3, dim=-1))
    later = torch.ones(5, 5).triu(1).bool()
    weights = torch.softmax((q @ k.mT * 4**-0.5).masked_fill(later, -torch.inf), -1)
    expected = theirs.c_proj((weights @ v).transpose(1, 2).reshape(2, 5, 12))
    moved = regard.nn.MultiHeadAttention.from_gpt2(theirs.c_attn, theirs.c_proj, 3).eval()
    assert moved(x).shape == (2, 5, 12)
    assert torch.allclose(moved(x), expected, atol=1e-6)


def test_004_both_dropouts_work_in_training_and_rest_in_evaluation():
    layer = regard.nn.MultiHeadAttention(12, 3, causal=True, dropout=0.1, residual_dropout=0.1)
    x = torch.randn(1, 5, 12)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))


def test_004_is_bounded_where_its_mask_ends_and_ours_is_not():
    # Its mask is stored for 1024 tokens; a longer text does not fit it.
    layer = regard.nn.MultiHeadAttention(12, 3, causal=True).eval()
    assert layer(torch.randn(1, 1025, 12)).shape == (1, 1025, 12)
