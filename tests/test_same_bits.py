"""Looking changes no number: the output has the same bits in every way of asking for it."""

import numpy as np
import pytest
import torch

import regard
from regard import Edit

SHAPES = {  # of query and key
    "many queries": ((2, 4, 70, 24), (2, 2, 300, 24)),
    "one query": ((2, 4, 1, 24), (2, 2, 300, 24)),
    "one query, a long cache": ((1, 8, 1, 64), (1, 2, 5000, 64)),
    "few queries of two heads": ((1, 4, 3, 40), (1, 2, 150, 40)),
    "one key": ((1, 2, 1, 8), (1, 2, 1, 8)),
}
OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window and cap": {"causal": True, "window": (120, 0), "softcap": 9.0},
    "sinks": {"sinks": True},
    "dropout": {"dropout": 0.3, "seed": 5},
    "mask": {"mask": True},
    "edits": {"edits": [Edit(1, None, slice(1), 0.0), Edit(0, -1, slice(0, 1), 3.0)]},
}
DTYPES = ["float32", "bfloat16", "float16", "float64"]


def draw(shape, dtype, options):
    torch.manual_seed(1)
    of_query, of_key = SHAPES[shape]
    arrays = [torch.randn(s).to(getattr(torch, dtype)) for s in (of_query, of_key, of_key)]
    options = dict(OPTIONS[options])
    if "sinks" in options:
        options["sinks"] = torch.randn(of_query[1]).to(arrays[0].dtype)
    if "mask" in options:
        options["mask"] = torch.rand(of_query[2], of_key[2]) < 0.7
    return arrays, options


def with_weights(arrays, options):
    return regard.attention(*arrays, return_weights=True, **options)[0]


def with_a_gradient(arrays, options):
    return regard.attention(*(x.clone().requires_grad_() for x in arrays), **options).detach()


def with_weights_and_a_gradient(arrays, options):
    arrays = [x.clone().requires_grad_() for x in arrays]
    return regard.attention(*arrays, return_weights=True, **options)[0].detach()


def compiled(arrays, options):
    torch._dynamo.reset()
    return torch.compile(regard.attention, backend="eager", fullgraph=True)(*arrays, **options)


WAYS = [with_weights, with_a_gradient, with_weights_and_a_gradient]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_output_has_the_same_bits_in_every_way_of_asking(shape, dtype, options):
    arrays, options = draw(shape, dtype, options)
    plain = regard.attention(*arrays, backend="kernel", **options)
    for way in WAYS:
        assert torch.equal(way(arrays, options), plain), way.__name__


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_output_has_the_same_bits_when_it_is_compiled(shape, dtype):
    arrays, options = draw(shape, dtype, "sinks")
    plain = regard.attention(*arrays, backend="kernel", **options)
    assert torch.equal(compiled(arrays, options), plain)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_output_has_the_same_bits_under_vmap(shape, dtype):
    arrays, _ = draw(shape, dtype, "plain")
    batch = [torch.stack([x, x.flip(-1), x * 2]) for x in arrays]
    mapped = torch.vmap(regard.attention)(*batch)
    for i, found in enumerate(mapped):
        assert torch.equal(found, regard.attention(*(x[i] for x in batch), backend="kernel"))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_output_has_the_same_bits_for_arrays(shape, dtype):
    arrays, _ = draw(shape, dtype, "plain")
    plain = regard.attention(*arrays, backend="kernel").numpy()
    arrays = [x.numpy() for x in arrays]
    np.testing.assert_array_equal(regard.attention(*arrays), plain)
    np.testing.assert_array_equal(regard.attention(*arrays, return_weights=True)[0], plain)


@pytest.mark.parametrize("scale", [1.0, 1e6])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_parts_of_the_weights_have_the_bits_of_the_whole(shape, dtype, scale):
    """Few queries add the products of a score in another order; so do parts of their weights."""
    arrays, options = draw(shape, dtype, "causal")
    _, weights = regard.attention(*arrays, return_weights=True, scale=scale, **options)
    whole = weights[...]
    assert (whole.double().sum(-1) - 1).abs().max() < 1e-6
    b, h, row = 0, whole.shape[1] - 1, whole.shape[2] - 1
    assert torch.equal(weights[b, h, row], whole[b, h, row])
    assert torch.equal(weights[b], whole[b])
    assert torch.equal(weights[..., ::2, :], whole[..., ::2, :])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
@pytest.mark.parametrize("causal", [False, True])
def test_rows_of_a_long_sequence_have_the_bits_of_a_call_of_a_few(dtype, causal):
    # Long enough for tiles of queries to wait for one another.
    torch.manual_seed(2)
    query, key, value = (torch.randn(1, 1, 4200, 64).to(getattr(torch, dtype)) for _ in range(3))
    value[..., 100, :] = torch.inf  # which early causal rows do not see
    before = regard.get_num_threads()
    try:
        regard.set_num_threads(1)
        whole = regard.attention(query, key, value, causal=causal)
    finally:
        regard.set_num_threads(before)
    some = regard.attention(query[..., -100:, :], key, value, causal=causal)
    assert torch.equal(whole[..., -100:, :], some)
    if causal:
        assert whole[..., :100, :].isfinite().all()
        few = regard.attention(*(x[..., :100, :] for x in (query, key, value)), causal=True)
        assert torch.allclose(whole[..., :100, :], few, rtol=0.01, atol=0.01)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (150, 70)}], ids=str)
def test_heads_whose_tiles_wait_together_have_the_bits_of_each_alone(dtype, options):
    # Heads of so many numbers that few keys fill the cache: tiles of several heads wait together.
    torch.manual_seed(3)
    query, key, value = (
        torch.randn(1, heads, tokens, 512).to(getattr(torch, dtype))
        for heads, tokens in ((10, 130), (5, 600), (5, 600))
    )
    value[:, 2, 580] = torch.nan  # of one key head of five
    before = regard.get_num_threads()
    try:
        regard.set_num_threads(1)
        whole = regard.attention(query, key, value, **options)
    finally:
        regard.set_num_threads(before)
    for h in range(5):
        own = (x.chunk(5, 1)[h] for x in (query, key, value))
        alone = regard.attention(*own, **options)
        assert torch.equal(whole.chunk(5, 1)[h].nan_to_num(7), alone.nan_to_num(7))
    exact = (x.chunk(5, 1)[2].double() for x in (query, key, value))
    expected = regard.attention(*exact, backend="reference", **options).to(whole.dtype)
    near = 0.02 if dtype == "bfloat16" else 1e-5
    found = whole.chunk(5, 1)[2]
    torch.testing.assert_close(found, expected, atol=near, rtol=near, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (150, 70)}], ids=str)
@pytest.mark.parametrize(
    ("of_keys", "of_values", "heads_first"),
    [(16, 128, True), (16, 384, True), (16, 70, False), (128, 16, True), (390, 16, True),
     (70, 16, False)],
)  # fmt: skip
def test_keys_and_values_that_are_packed_in_panels_have_the_bits_of_those_in_place(
    dtype, options, of_keys, of_values, heads_first
):
    # So many queries that packing is worth it: of long rows, of multiples of 512 bytes, and of
    # others that lie apart.
    torch.manual_seed(4)

    def randn(heads, tokens, numbers):
        if heads_first:
            return torch.randn(1, heads, tokens, numbers, dtype=torch.float64)
        return torch.randn(1, tokens, heads, numbers, dtype=torch.float64).transpose(1, 2)

    query, key, value = randn(4, 520, of_keys), randn(2, 901, of_keys), randn(2, 901, of_values)
    value[:, 1, 850] = torch.nan  # which some do not see
    query, key, value = (x.to(getattr(torch, dtype)) for x in (query, key, value))
    before = regard.get_num_threads()
    found = []
    try:
        # Many threads take few tiles each.
        for threads, rows in ((1, (key, value)), (16, (key.contiguous(), value.contiguous()))):
            regard.set_num_threads(threads)
            found.append(regard.attention(query, *rows, **options))
    finally:
        regard.set_num_threads(before)
    assert torch.equal(*(x.nan_to_num(7) for x in found))
    exact = (x.double() for x in (query, key, value))
    expected = regard.attention(*exact, backend="reference", **options).to(query.dtype)
    near = {"bfloat16": 0.02, "float16": 4e-3}.get(dtype, 1e-5)
    torch.testing.assert_close(found[0], expected, atol=near, rtol=near, equal_nan=True)
