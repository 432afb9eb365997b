"""The comparison itself: it must fail when it should."""

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from regard.testing import assert_matches

INF, NAN = np.inf, np.nan


def test_equal_arrays_match():
    x = np.linspace(-1, 1, 7)
    assert_matches(x, x, x)


def test_empty_arrays_match():
    x = np.zeros((0, 3), np.float32)
    assert_matches(x, x, x)


def test_scalars_match_and_differ():
    assert_matches(np.float32(1.0), 1.0, 1.0)
    with pytest.raises(AssertionError, match=r"at \(\)"):
        assert_matches(np.float32(1.1), 1.0, 1.0)


def test_an_error_of_twice_the_low_precision_error_is_the_limit():
    exact = np.array([1.0, 4.0])
    low = exact + [0.0, 0.125]  # the largest error counts, wherever it is
    assert_matches(exact + [0.25, 0.0], exact, low)
    with pytest.raises(AssertionError, match=r"twice the low-precision error 0[.]125 "):
        assert_matches(exact + [0.2501, 0.0], exact, low)


@pytest.mark.parametrize(
    ("dtype", "spacing"),
    [("float16", 2.0**-10), ("float32", 2.0**-23), ("float64", 2.0**-52)],
)
@pytest.mark.parametrize("value", [1.0, -1.0, 1024.0, 2.0**-9])
def test_one_rounding_is_allowed_and_two_are_not(dtype, spacing, value):
    exact = np.array([0.0, value])
    assert_matches((exact * (1 + spacing)).astype(dtype), exact, exact)
    with pytest.raises(AssertionError, match=f"one {dtype} rounding"):
        assert_matches((exact * (1 + 2 * spacing)).astype(dtype), exact, exact)


def test_one_rounding_of_bfloat16_in_both_libraries():
    exact = np.array([1.0])
    assert_matches(torch.tensor([1 + 2.0**-7], dtype=torch.bfloat16), exact, exact)
    assert_matches(np.array([1 + 2.0**-7], dtype=ml_dtypes.bfloat16), exact, exact)
    with pytest.raises(AssertionError, match="one bfloat16 rounding"):
        assert_matches(torch.tensor([1 + 2.0**-6], dtype=torch.bfloat16), exact, exact)
    with pytest.raises(AssertionError, match="one bfloat16 rounding"):
        assert_matches(np.array([1 + 2.0**-6], dtype=ml_dtypes.bfloat16), exact, exact)


def test_the_rounding_is_that_of_each_value_not_of_the_largest():
    exact = np.array([1e6, 1e-6])
    with pytest.raises(AssertionError, match=r"at \(1,\)"):
        assert_matches((exact + [0, 1e-9]).astype(np.float32), exact, exact)


def test_zero_allows_the_smallest_number_only():
    zero = np.zeros(1)
    tiny = np.float32(2.0**-149)
    assert_matches(np.full(1, tiny), zero, zero)
    assert_matches(np.full(1, -0.0, np.float32), zero, zero)
    with pytest.raises(AssertionError, match="is over"):
        assert_matches(np.full(1, 2 * tiny), zero, zero)


@given(st.floats(allow_nan=False, allow_infinity=False, width=32))
def test_a_float32_number_matches_its_neighbour(value):
    exact = np.array([value])
    bits = np.float32([value]).view(np.int32)
    away = (bits + 1).view(np.float32)  # the next larger magnitude
    if np.isfinite(away).all():
        assert_matches(away, exact, exact)


@pytest.mark.parametrize(
    ("actual", "exact", "kind"),
    [
        ([NAN, 1.0], [0.0, 1.0], "NaN"),
        ([0.0, 1.0], [NAN, 1.0], "NaN"),
        ([NAN, 1.0], [1.0, NAN], "NaN"),
        ([NAN, NAN], [NAN, 1.0], "NaN"),
        ([INF, 1.0], [NAN, 1.0], "NaN"),
        ([INF, 1.0], [0.0, 1.0], r"\+inf"),
        ([0.0, 1.0], [INF, 1.0], r"\+inf"),
        ([INF, -INF], [-INF, INF], r"\+inf"),
        ([-INF, 1.0], [0.0, 1.0], "-inf"),
        ([0.0, 1.0], [-INF, 1.0], "-inf"),
    ],
)
def test_nan_and_infinities_must_be_in_the_same_places(actual, exact, kind):
    actual, exact = np.array(actual), np.array(exact)
    with pytest.raises(AssertionError, match=f"^{kind} in different places"):
        assert_matches(actual, exact, exact)
    with pytest.raises(AssertionError, match=f"^{kind} in different places"):
        assert_matches(torch.tensor(actual), torch.tensor(exact), torch.tensor(exact))


def test_nan_and_infinities_in_the_same_places_match_and_the_rest_is_still_compared():
    exact = np.array([NAN, INF, -INF, 1.0])
    assert_matches(exact.astype(np.float32), exact, exact)
    with pytest.raises(AssertionError, match=r"at \(3,\)"):
        assert_matches(exact + [0, 0, 0, 1e-3], exact, exact)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_low_precision_result_that_failed_allows_nothing(bad):
    exact = np.array([1.0, 2.0])
    with pytest.raises(AssertionError, match="low-precision error 0 "):
        assert_matches(exact + [0.5, 0.0], exact, np.array([bad, 2.0]))


@pytest.mark.parametrize("shapes", [((3,), (4,), (3,)), ((3,), (3,), (1,)), ((3, 1), (3,), (3,))])
def test_shapes_must_be_equal_even_where_they_would_broadcast(shapes):
    actual, exact, low = (np.zeros(shape) for shape in shapes)
    with pytest.raises(AssertionError, match="shapes differ: actual "):
        assert_matches(actual, exact, low)


def test_rows_that_are_off_by_one_do_not_match():
    x = np.arange(6.0).reshape(3, 2)
    with pytest.raises(AssertionError, match="4 of 4 places are over"):
        assert_matches(x[1:], x[:-1], x[:-1])


def test_the_message_names_the_worst_place_and_both_errors():
    exact = np.zeros((2, 3))
    actual, low = exact.copy(), exact.copy()
    actual[0, 1], actual[1, 2], low[1, 0] = 0.5, -3.0, 0.01
    with pytest.raises(AssertionError) as caught:
        assert_matches(actual, exact, low)
    text = str(caught.value)
    assert "error 3 at (1, 2) is over 0.02: twice the low-precision error 0.01 and one" in text
    assert "actual -3  exact 0  low_precision 0" in text
    assert "2 of 6 places are over" in text


def test_numpy_and_torch_compare_with_each_other():
    exact = np.array([1.0, 2.0])
    actual = torch.tensor([1.0, 2.0], requires_grad=True)
    assert_matches(actual, exact, actual)
    with pytest.raises(AssertionError, match=r"at \(1,\)"):
        assert_matches(actual + torch.tensor([0.0, 0.1]), exact, actual)


@pytest.mark.parametrize("actual", [np.arange(3), torch.arange(3), np.zeros(3, np.complex64)])
def test_numbers_that_are_not_floating_are_refused(actual):
    with pytest.raises(TypeError, match=r"actual is .*; one of float16, bfloat16"):
        assert_matches(actual, np.arange(3.0), np.arange(3.0))


@pytest.mark.parametrize("other", [np.array([1 + 5j]), np.array(["1"]), torch.tensor([True])])
def test_what_is_no_real_number_is_refused(other):
    one = np.float32([1.0])
    for name in ("exact", "low_precision"):
        with pytest.raises(TypeError, match=f"{name} is .*; real numbers are needed"):
            assert_matches(one, **{"exact": one, "low_precision": one, name: other})
    assert_matches(one, np.array([1]), torch.tensor([1]))
