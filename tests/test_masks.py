"""A bool mask is read once: intervals replace it, and blocks of keys that it hides are skipped."""

import numpy as np
import pytest
import torch

import regard
from ways import DIFFERENTIABLE, by_ways

Lq, Lk = 333, 401
i, j = torch.arange(Lq)[:, None], torch.arange(Lk)
places = i + Lk - Lq
generator = torch.Generator().manual_seed(0)
holes = torch.rand(Lq, Lk, generator=generator) < 0.5
ends = torch.where((i >= 90) & (i < 250), 320, places + 1)
# By name: the mask, and the options that say the same.
SAME = {
    "causal": (j <= places, {"causal": True}),
    "window": ((j <= places) & (j >= places - 40), {"causal": True, "window": (40, 0)}),
    "two ways in a text": (j < ends, {"intervals": (torch.zeros(Lq, dtype=int), ends[:, 0])}),
    "padding": ((j < 170)[None], {"key_lengths": 170, "query_start": Lk - Lq}),
    "left padding": ((j >= 150)[None], {"intervals": (torch.full((Lq,), 150), [Lk] * Lq)}),
    "chunks": (i // 50 == j // 50, {"segments": (i[:, 0] // 50, j // 50)}),
    "everything": (torch.ones(1, 1, dtype=bool), {}),
    "nothing": (torch.zeros(Lq, 1, dtype=bool), {"key_lengths": 0, "query_start": Lk - Lq}),
}
# Those that are no intervals.
HOLES = {
    "random": holes,
    "blocks": (i // 128 + j // 128) % 3 == 0,
    "one block": (i > 200) & (j > 140) & (j < 250) & holes,
    "diagonals": (i - j) % 150 == 0,
    "of a head": torch.stack([j <= places, holes, holes & (j > 300), (i + j) % 2 == 0]),
    "of a text": torch.stack([j <= places, holes])[:, None],
    "of keys": j % 7 < 3,
    "transposed": holes.T.contiguous().T,
    "every other": (torch.rand(2 * Lq, 2 * Lk, generator=generator) < 0.4)[::2, ::2],
}


@pytest.fixture(scope="module")
def qkv():
    torch.manual_seed(0)
    return torch.randn(2, 4, Lq, 8), torch.randn(2, 2, Lk, 8), torch.randn(2, 2, Lk, 5)


def gradients(inputs, options):
    inputs = [x.clone().requires_grad_() for x in inputs]
    out = regard.attention(*inputs, backend="kernel", **options)
    return out.detach(), *torch.autograd.grad(out.square().sum(), inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", SAME)
def test_a_mask_of_intervals_has_the_bits_of_the_option(qkv, name, dtype):
    mask, options = SAME[name]
    inputs = [x.to(dtype) for x in qkv]
    for found, expected in zip(gradients(inputs, {"mask": mask}), gradients(inputs, options)):
        assert torch.equal(found, expected)
    found = regard.AttentionWeights(*inputs[:2], mask=mask).summary(pool=(20, 30))
    expected = regard.AttentionWeights(*inputs[:2], **options).summary(pool=(20, 30))
    for name in found._fields:
        for x, y in zip(*map(np.atleast_1d, (getattr(found, name), getattr(expected, name)))):
            np.testing.assert_array_equal(x, y, err_msg=name)


@by_ways(*DIFFERENTIABLE)
@pytest.mark.parametrize("name", HOLES)
def test_a_mask_with_holes_hides_what_it_says(qkv, name, way):
    mask = HOLES[name]
    q, k, v = (x.double() for x in qkv)
    exact = regard.attention(
        *(x.numpy() for x in (q, k, v)), mask=mask.numpy(), backend="reference"
    )
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    out = regard.attention(*inputs, mask=mask, backend=way.backend)
    np.testing.assert_allclose(out.detach(), exact, rtol=1e-11, atol=1e-13)
    found = torch.autograd.grad(out.square().sum(), inputs)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    s = leaves[0] @ leaves[1].repeat_interleave(2, 1).mT / 8**0.5
    w = torch.softmax(s.masked_fill(~mask, -torch.inf), -1).nan_to_num(0.0)
    plain = torch.where(mask, w, 0.0) @ leaves[2].repeat_interleave(2, 1)
    for x, y in zip(found, torch.autograd.grad(plain.square().sum(), leaves)):
        torch.testing.assert_close(x, y.nan_to_num(0.0), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", HOLES)
def test_weights_under_a_mask_with_holes(qkv, name):
    arrays = [x.double().numpy() for x in qkv[:2]]
    mask = HOLES[name].numpy()
    found = regard.AttentionWeights(*arrays, mask=mask, backend="kernel")
    exact = regard.AttentionWeights(*arrays, mask=mask, backend="reference")
    np.testing.assert_allclose(np.asarray(found), np.asarray(exact), rtol=1e-11, atol=1e-15)
    summaries = found.summary(pool=(20, 30)), exact.summary(pool=(20, 30))
    for name in ("lse", "entropy", "received", "distance", "pooled"):
        x, y = (getattr(summary, name) for summary in summaries)
        np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(summaries[0].topk.values, summaries[1].topk.values, rtol=1e-11)


@pytest.mark.parametrize("name", ["causal", "window", "chunks"])
@pytest.mark.parametrize("rows", [1, 3, Lq])
def test_a_mask_of_intervals_computes_alike_beside_one_with_holes(qkv, name, rows):
    mask = SAME[name][0][-rows:]
    both = torch.stack([mask, mask & holes[:rows]])[:, None]
    q, k, v = qkv
    together = regard.attention(q[:, :, :rows], k, v, mask=both, backend="kernel")
    for b in range(2):
        alone = regard.attention(q[b, :, :rows], k[b], v[b], mask=both[b], backend="kernel")
        assert torch.equal(together[b], alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("queries", [1, 2])
def test_few_queries_under_a_mask_with_holes_match_the_definition(queries, dtype):
    """Over several pieces of keys; one row sees nothing, and what nobody sees is NaN."""
    draw = torch.Generator().manual_seed(queries)
    q = torch.randn(3, 4, queries, 16, generator=draw).to(dtype)
    k, v = (torch.randn(3, 2, 9001, 16, generator=draw).to(dtype) for _ in range(2))
    mask = (
        torch.rand(3, 4, queries, 9001, generator=draw)
        < torch.tensor([0.5, 0.01, 1.0, 0.9])[:, None, None]
    )
    mask[1, 2, 0] = False
    mask[..., 5000:5003] = False
    k[..., 5001, :] = v[..., 5002, :] = torch.nan
    out, weights = regard.attention(q, k, v, mask=mask, backend="kernel", return_weights=True)
    wide = (x.double().numpy() for x in (q, k, v))
    exact = regard.attention(*wide, mask=mask.numpy(), backend="reference")
    limit = {torch.bfloat16: 2e-2, torch.float16: 2e-3, torch.float32: 2e-6}.get(dtype, 1e-13)
    np.testing.assert_allclose(out.double(), exact, rtol=limit, atol=limit)
    assert not out[1, 2, 0].any()
    strided = torch.stack([mask, ~mask], -1)[..., 0]
    assert torch.equal(regard.attention(q, k, v, mask=strided, backend="kernel"), out)
    sums = np.asarray(weights[:, :]).sum(-1)
    np.testing.assert_allclose(sums, mask.any(-1), rtol=2e-6)


def test_a_mask_of_each_head_is_read_by_several_threads():
    q = torch.randn(1, 8, 700, 8)
    mask = torch.rand(8, 700, 700) < torch.linspace(0, 1, 8)[:, None, None]
    threads = regard.get_num_threads()
    try:
        regard.set_num_threads(1)
        one = regard.attention(q, q, q, mask=mask, backend="kernel")
        regard.set_num_threads(3)
        assert torch.equal(regard.attention(q, q, q, mask=mask, backend="kernel"), one)
    finally:
        regard.set_num_threads(threads)
