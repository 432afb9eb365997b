"""Few queries of many keys, which the kernels in Triton split: see ``test_triton``."""

import importlib.util

import numpy as np
import pytest
import torch

import regard
import stand
from test_triton import OnDevice, attend, draw, first_gradients, shifted

if importlib.util.find_spec("triton") is not None:
    from regard._backends import triton_ops

Lq, Lk = 3, 1025
OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": (300, 3)},
    "lengths": {"causal": True, "key_lengths": torch.tensor([1000, 2])},
    "none": {"intervals": (torch.tensor([9, 4, 7]), torch.tensor([9, 900, 8]))},
    "packed": {"segments": (torch.arange(Lq) // 2, torch.arange(Lk) // 600)},
    "capped": {"softcap": 4.0, "sinks": torch.tensor([1.0, -2.0, 30.0, 0.0])},
    "mask": {"mask": torch.rand(4, Lq, Lk, generator=torch.Generator().manual_seed(1)) < 0.5},
    "bias": {"bias": torch.sin(torch.arange(4.0 * Lk)).reshape(4, 1, Lk)},
    "dropped": {"dropout": 0.4, "seed": -123456789012345},
    "edited": {"edits": [regard.Edit(1, slice(2), slice(2, 900), 0.0),
                         regard.Edit(2, slice(1, 3), slice(60), 3.0)]},
    "part": {"query_start": 900, "key_start": 3, "key_step": 2, "dropout": 0.2, "seed": 5,
             "causal": True},
}  # fmt: skip


def inputs(dtype=torch.float32):
    return draw((2, 4, Lq, 24), (2, 2, Lk, 24), (2, 2, Lk, 20), dtype=dtype)


@pytest.mark.interpreted
@pytest.mark.parametrize("name", OPTIONS)
def test_split_keys_give_the_definition_with_each_option(name):
    q, k, v = inputs()
    found = attend(*map(shifted, (q, k, v)), **OPTIONS[name], return_weights=True,
                   return_statistics=True)  # fmt: skip
    options = {n: x.double() if n == "sinks" else x for n, x in OPTIONS[name].items()}
    expected = regard.attention(*(x.double() for x in (q, k, v)), **options, backend="torch",
                                return_weights=True, return_statistics=True)  # fmt: skip
    torch.testing.assert_close(found[0].double(), expected[0], rtol=2e-6, atol=2e-6)
    for x, y in zip(found[2], expected[2]):
        torch.testing.assert_close(x.double(), y, rtol=1e-5, atol=1e-5)
    whole = found[1][...].double()
    torch.testing.assert_close(whole, expected[1][...], rtol=2e-5, atol=1e-6)


@pytest.mark.interpreted
@pytest.mark.parametrize("length", [511, 512, 513, 767, 1024, 4099, 17_000])
def test_split_keys_of_any_number(length):
    q, k, v = draw((1, 4, 1, 8), (1, 1, length, 8), (1, 1, length, 5), dtype=torch.float16)
    found = attend(q, k, v)
    exact = regard.attention(*(x.double() for x in (q, k, v)), backend="torch")
    torch.testing.assert_close(found.double(), exact, rtol=1e-3, atol=1e-4)


@pytest.mark.interpreted
def test_scores_of_any_size_of_split_keys_have_rows_that_sum_to_one():
    q, k, v = inputs()
    for size in (1.0, 1e3, 1e10, 1e18):
        out, weights = attend(q * size, k * size, v, causal=True, return_weights=True)
        whole = weights[...].double()
        torch.testing.assert_close(whole.sum(-1), torch.ones_like(whole[..., 0]), atol=1e-6, rtol=0)
        exact = whole @ v.repeat_interleave(2, 1).double()
        torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.interpreted
@pytest.mark.parametrize("name", ["plain", "causal", "packed", "dropped", "edited"])
def test_what_is_not_finite_in_split_keys_reaches_the_rows_that_see_it_and_no_others(name):
    q, k, v = inputs()
    v[0, 0, 700, 0], v[0, 1, 1024, 1], v[1, 0, 50:60, 2] = np.nan, np.inf, -np.inf
    v[1, 0, 55, 2], k[1, 1, 70], q[0, 3, 2] = np.inf, np.nan, np.nan
    found = attend(q, k, v, **OPTIONS[name])
    expected = regard.attention(q, k, v, **OPTIONS[name], backend="torch")
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=2e-6, equal_nan=True)


@pytest.mark.interpreted
def test_gradients_of_split_keys():
    (upstream,) = draw((2, 4, Lq, 20))
    options = OPTIONS["capped"]
    for x, y in zip(*(first_gradients(inputs(), name, upstream, **options)
                      for name in ("triton", "torch"))):  # fmt: skip
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


@pytest.mark.interpreted
def test_neither_batch_nor_weights_nor_runs_change_a_bit_of_split_keys():
    q, k, v = draw((3, 4, 2, 8), (3, 2, 700, 8), (3, 2, 700, 8))
    v[0, 0, 3, 1] = np.nan  # another kernel computes that element
    options = {"causal": True, "return_statistics": True}
    out, rows = attend(q, k, v, **options)
    alone, of_alone = attend(q[1:2], k[1:2], v[1:2], **options)
    again, weights = attend(q, k, v, causal=True, return_weights=True)
    assert torch.equal(out[1:2], alone)
    assert torch.equal(out.nan_to_num(), again.nan_to_num())
    for x, y, z in zip(rows, of_alone, weights.statistics):
        assert torch.equal(x[1:2], y)
        assert torch.equal(x, z)


@pytest.mark.interpreted
def test_rows_alone_have_the_statistics_of_all_rows_of_a_few():
    q, k, _ = inputs()
    options = {"window": (300, 0), "backend": "triton"}
    whole, some = (regard.AttentionWeights(q, k, **options) for _ in range(2))
    part = some[:, 1:3, 1:2]
    assert torch.equal(part, whole[...][:, 1:3, 1:2])


@pytest.mark.interpreted
def test_parts_of_keys_are_as_many_as_their_number_says():
    for length, parts in ((512, 2), (513, 3), (4096, 16), (16_384, 64), (32_768, 64)):
        q, k, v = draw((1, 2, 1, 4), *2 * [(1, 1, length, 4)])
        for batch in (1, 3):
            grids = {}

            def launch(kernel, grid, *_, grids=grids, **__):
                grids[kernel.__name__] = grid

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(triton_ops, "launch", launch)
                attend(*(x.expand(batch, -1, -1, -1) for x in (q, k, v)))
            expected = {"attend_part": (parts, 1, batch), "merge_parts": (1, 2, batch)}
            assert grids == expected


CALLS = {
    "plain": (["ones", "attend_part", "merge_parts"], {}),
    "causal": (["ones", "intervals", "attend_part", "merge_parts", "attend"], {"causal": True}),
}


@pytest.mark.interpreted
@pytest.mark.parametrize("name", CALLS)
def test_on_a_device_one_query_of_any_number_of_keys_is_the_same_launches(name):
    launches, options = CALLS[name]
    for length in (600, 1300):
        x = OnDevice(length)
        x.q = stand.on_device(draw((1, 4, 1, 8))[0])
        with stand.device() as seen, stand.with_triton():
            x.attend(**options)
        assert sum(seen.waits.values()) == sum(seen.uploads.values()) == 0
        assert seen.operations == dict.fromkeys(launches, 1)


@pytest.mark.interpreted
def test_few_queries_of_many_keys_are_not_for_torchs_fused_operator():
    q, k, v = inputs()
    with pytest.raises(regard.UnsupportedError, match="without a plan per length"):
        regard.attention(q, k, v, backend="fused")
