"""Places of queries up to the limit are exact; what lies beyond is refused, never wrong."""

import numpy as np
import pytest
import torch

import regard

FAR = 2**53
INT64 = np.iinfo(np.int64)
SERVED = [("numpy", "kernel"), ("numpy", "reference"), ("torch", "kernel"), ("torch", "torch")]
rng = np.random.default_rng(0)
QUERY, KEY, VALUE = (rng.standard_normal((2, 3, n, 4)).astype(np.float32) for n in (5, 7, 7))


def attend(served, **options):
    library, backend = served
    arrays = [QUERY, KEY, VALUE]
    if library == "torch":
        arrays = [torch.from_numpy(x) for x in arrays]
    return np.asarray(regard.attention(*arrays, backend=backend, **options))


@pytest.mark.parametrize("place", [FAR, FAR - 1, 2**31, 2**62 // 2**9])
@pytest.mark.parametrize("served", SERVED, ids="-".join)
def test_a_query_far_behind_the_keys_sees_them_all(served, place):
    everything = attend(served)
    np.testing.assert_array_equal(attend(served, causal=True, query_start=place), everything)
    reach = {"window": (2**63 - 1, 0), "query_start": np.array([place, -place])}
    found = attend(served, **reach)
    np.testing.assert_array_equal(found[0], everything[0])
    assert (found[1] == 0).all()


@pytest.mark.parametrize("served", SERVED, ids="-".join)
def test_a_query_far_before_the_keys_sees_none(served):
    assert (attend(served, causal=True, query_start=-FAR) == 0).all()
    assert (attend(served, window=(3, 3), query_start=-FAR) == 0).all()
    assert (attend(served, window=(3, 3), query_start=FAR) == 0).all()
    both_sides = attend(served, window=(FAR + 9, FAR + 9), query_start=[FAR, -FAR])
    np.testing.assert_array_equal(both_sides, attend(served))


@pytest.mark.parametrize("start", [INT64.max, INT64.min, FAR + 1, -FAR - 1])
@pytest.mark.parametrize("place", [int, np.int64, np.array, lambda x: np.array([0, x])])
@pytest.mark.parametrize("served", SERVED, ids="-".join)
def test_a_place_beyond_the_limit_is_refused(served, place, start):
    with pytest.raises(ValueError, match=r"query_start is -?\d+; .* between -2\*\*53 and 2\*\*53"):
        attend(served, causal=True, query_start=place(start))


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_weights_refuse_it_as_the_operator_does(library):
    query, key = (QUERY, KEY) if library == "numpy" else map(torch.from_numpy, (QUERY, KEY))
    weights = regard.AttentionWeights(query, key, causal=True, query_start=2**63 - 1)
    with pytest.raises(ValueError, match="between -2"):
        weights.entropy()


@pytest.mark.parametrize("name", ["query_start", "key_lengths", "segments"])
@pytest.mark.parametrize("served", SERVED, ids="-".join)
def test_integers_without_a_sign_are_refused(served, name):
    ids = np.ones((2, 7) if name == "segments" else 2, np.uint64)
    ids = (ids[:, :5], ids) if name == "segments" else ids
    with pytest.raises(TypeError, match=f"{name} is uint64; integers with a sign are needed"):
        attend(served, **{name: ids})
    for wide in (2**63, -(2**63) - 1):
        wrong = (wide, wide) if name == "segments" else wide
        with pytest.raises(ValueError, match=f"{name} is {wide}; it must fit into 64 bits"):
            attend(served, **{name: wrong})


@pytest.mark.parametrize("step", [np.int64(1), np.uint8(1)])
@pytest.mark.parametrize("name", ["query_step", "key_step"])
def test_a_step_of_one_is_that_of_a_whole_text_in_any_type(name, step):
    found = attend(("numpy", "kernel"), causal=True, **{name: step})
    np.testing.assert_array_equal(found, attend(("numpy", "kernel"), causal=True))


@pytest.mark.parametrize("backend", ["kernel", "torch", "reference"])
@pytest.mark.parametrize("dtype", ["uint8", "int16", "uint16", "uint32"])
def test_segments_of_queries_and_keys_may_be_of_two_dtypes(backend, dtype):
    of_queries, of_keys = torch.arange(5) // 2, torch.arange(7) // 2
    narrow = of_keys.to(getattr(torch, dtype))
    served = "torch", backend
    found, right = (attend(served, segments=(of_queries, x)) for x in (narrow, of_keys))
    np.testing.assert_array_equal(found, right)


@pytest.mark.parametrize("served", SERVED, ids="-".join)
def test_segments_may_be_any_integers_with_a_sign(served):
    ids = np.array([INT64.min, INT64.min, -1, 0, 0, INT64.max, INT64.max])
    renamed = np.array([0, 0, 1, 2, 2, 3, 3])
    far, near = (attend(served, segments=(x[:5], x)) for x in (ids, renamed))
    np.testing.assert_array_equal(far, near)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.int32])
def test_narrow_integers_do_not_overflow(dtype):
    starts, long = np.array([100], dtype), np.ones((1, 300, 1), np.float32)
    weights = regard.AttentionWeights(long, long, causal=True, query_start=starts)
    assert (weights[0, 255] > 0).all()
    assert (weights[0, 150] > 0).sum() == 251
