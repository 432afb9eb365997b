import copy
import pickle

import numpy as np
import pytest
import torch

import regard
from regard.nn import KeyValueCache, MultiHeadAttention


def make(**options):
    torch.manual_seed(0)
    return MultiHeadAttention(16, 4, causal=True, dtype=torch.float64, **options).eval()


OPTIONS = [
    {},
    {"num_kv_heads": 2},
    {"rope": 100.0},
    {"window": (3, 0)},
    {"window": (0, None)},
    {"window": (None, 0)},
    {"window": (5, 0), "rope": 100.0, "num_kv_heads": 1, "softcap": 3.0, "bias": False},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("chunks", [[1] * 24, [9] + [1] * 15, [4, 1, 7, 1, 1, 10], [24]], ids=str)
@torch.no_grad()
def test_generation_with_a_cache_equals_one_forward_pass(options, chunks):
    layer = make(**options)
    x = torch.randn(2, 24, 16, dtype=torch.float64)
    cache = layer.new_cache()
    outputs = [layer(part, cache=cache) for part in x.split(chunks, 1)]
    torch.testing.assert_close(torch.cat(outputs, 1), layer(x), rtol=0, atol=1e-13)
    assert cache.length == 24


@torch.no_grad()
def test_the_weights_of_a_step_cover_all_tokens_so_far_and_stay_true():
    layer = make(rope=100.0)
    x = torch.randn(2, 12, 16, dtype=torch.float64)
    _, whole = layer(x, return_weights=True)
    cache = layer.new_cache()
    steps = [layer(x[:, i : i + 1], cache=cache, return_weights=True)[1] for i in range(12)]
    for i, weights in enumerate(steps):
        assert weights.shape == (2, 4, 1, i + 1)
        needed = whole[:, :, i : i + 1, : i + 1]
        torch.testing.assert_close(weights[:], needed, rtol=0, atol=1e-13)


@torch.no_grad()
def test_a_window_bounds_what_is_held_and_older_weights_stay_true():
    layer = make(window=(5, 0))
    x = torch.randn(1, 100, 16, dtype=torch.float64)
    _, whole = layer(x, return_weights=True)
    cache, steps = layer.new_cache(), []
    for i in range(100):
        _, weights = layer(x[:, i : i + 1], cache=cache, return_weights=True)
        assert weights.shape[-1] <= 12
        assert weights.shape[-1] == cache.length - cache.start
        steps.append((cache.start, weights))
    assert cache.start >= 88
    for i, (start, weights) in enumerate(steps):
        needed = whole[:, :, i : i + 1, start : i + 1]
        torch.testing.assert_close(weights[:], needed, rtol=0, atol=1e-13)


@pytest.mark.parametrize("window", [None, (4, 0)])
@torch.no_grad()
def test_left_padding_and_segments_work_by_mask_over_all_tokens(window):
    layer = make(window=window, rope=100.0)
    x = torch.randn(2, 20, 16, dtype=torch.float64)
    padding = 3
    visible = torch.ones(2, 1, 1, 20, dtype=torch.bool)
    visible[0, ..., :padding] = False
    ids = torch.arange(20).expand(2, 20) // 8
    cache = layer.new_cache()
    outputs = []
    for i in range(20):
        mask, bias = visible[..., : i + 1], torch.zeros(i + 1, dtype=torch.float64)
        segments = ids[:, i : i + 1], ids[:, : i + 1]
        part = x[:, i : i + 1]
        outputs.append(layer(part, cache=cache, mask=mask, bias=bias, segments=segments))
    output = torch.cat(outputs, 1)
    alone = layer(x[0, padding:], segments=ids[0, padding:])
    torch.testing.assert_close(output[0, padding:], alone, rtol=0, atol=1e-13)
    torch.testing.assert_close(output[1], layer(x[1], segments=ids[1]), rtol=0, atol=1e-13)


@torch.no_grad()
def test_a_call_that_fails_leaves_the_cache_as_it_was():
    layer = make()
    x = torch.randn(1, 6, 16, dtype=torch.float64)
    cache = layer.new_cache()
    layer(x[:, :5], cache=cache)
    with pytest.raises(regard.ShapeError, match="mask"):
        layer(x[:, 5:], cache=cache, mask=torch.ones(3, dtype=torch.bool))
    assert cache.length == 5
    torch.testing.assert_close(layer(x[:, 5:], cache=cache), layer(x)[:, 5:], rtol=0, atol=1e-13)


@torch.no_grad()
@pytest.mark.parametrize("capacity", [0, 10])
def test_a_call_that_fails_after_attention_leaves_the_cache_as_it_was(capacity):
    def fail(module, args):
        raise RuntimeError("out of memory")

    layer = make()
    x = torch.randn(2, 6, 16, dtype=torch.float64)
    cache = layer.new_cache(capacity)
    for part in (x[:, :3], x[:1, :5], x[:1, 5:]):  # the first of another batch
        hook = layer.out_proj.register_forward_pre_hook(fail)
        before = cache.length
        with pytest.raises(RuntimeError, match="out of memory"):
            layer(part, cache=cache)
        assert cache.length == before
        hook.remove()
        if part.shape[0] == 1:
            output = layer(part, cache=cache)
    torch.testing.assert_close(output, layer(x[:1])[:, 5:], rtol=0, atol=1e-13)


@torch.inference_mode()
def test_generation_in_inference_mode_and_bfloat16():
    layer = make(rope=100.0).to(torch.bfloat16)
    x = torch.randn(1, 6, 16, dtype=torch.bfloat16)
    cache = layer.new_cache()
    output = torch.cat([layer(part, cache=cache) for part in x.split(1, 1)], 1)
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output, layer(x), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("capacity", [0, 10])
def test_a_prompt_read_in_inference_mode_goes_on_outside_of_it(capacity):
    layer = make(rope=100.0)
    x = torch.randn(2, 8, 16, dtype=torch.float64)
    cache = layer.new_cache(capacity)
    with torch.inference_mode():
        outputs = [layer(x[:, :5], cache=cache)]
    with torch.no_grad():
        outputs += [layer(x[:, i : i + 1], cache=cache) for i in range(5, 8)]
        torch.testing.assert_close(torch.cat(outputs, 1), layer(x), rtol=0, atol=1e-13)


def test_memory_grows_by_doubling_unless_its_size_is_told():
    def places(cache, steps):
        seen = set()
        for _ in range(steps):
            key, _ = cache.append(torch.ones(1, 1, 2), torch.ones(1, 1, 3))
            seen.add(key.data_ptr())
        return len(seen)

    assert places(KeyValueCache(), 1000) <= 10
    assert places(KeyValueCache(capacity=1000), 1000) == 1


def test_memory_is_what_was_told_where_the_first_tokens_fit():
    for told, first, taken in ((9, 5, 9), (5, 5, 5), (4, 5, 10), (0, 5, 10)):
        cache = KeyValueCache(capacity=told)
        cache.append(torch.ones(1, first, 2), torch.ones(1, first, 3))
        assert (cache._key.shape[1], cache._value.shape[1]) == (taken, taken)


@pytest.mark.parametrize("keep", [None, 3])
def test_arrays_of_numpy_are_held_as_tensors_are(keep):
    x = np.random.default_rng(0).standard_normal((2, 40, 4)).astype(np.float32)
    caches, held = (KeyValueCache(keep), KeyValueCache(keep)), []
    for rows in np.split(x, [7, 8, 9, 20, 21], axis=1):
        key, value = caches[0].append(rows, rows[..., :3])
        like = caches[1].append(*(torch.from_numpy(y.copy()) for y in (rows, rows[..., :3])))
        for y, z in zip((key, value), like):
            assert isinstance(y, np.ndarray)
            np.testing.assert_array_equal(y, z.numpy())
        held.append((key, key.copy(), caches[0].start))
    assert (caches[0].start, caches[0].length) == (caches[1].start, 40)
    for key, then, start in held:  # never written over
        np.testing.assert_array_equal(key, then)
        np.testing.assert_array_equal(key, x[:, start : start + key.shape[1]])
    assert str(caches[0]).endswith("float32)")
    with pytest.raises(TypeError, match="is float64 of NumPy, what is held float32 of NumPy"):
        caches[0].append(x.astype(float), x[..., :3].astype(float))
    with pytest.raises(TypeError, match="both must be of one library"):
        KeyValueCache().append(x, torch.from_numpy(x))


def test_append_gives_all_that_is_held():
    cache = KeyValueCache()
    assert str(cache) == "KeyValueCache(empty)"
    key, value = torch.randn(2, 5, 4), torch.randn(2, 5, 3)
    cache.append(key[:, :2], value[:, :2])
    held = cache.append(key[:, 2:], value[:, 2:])
    assert torch.equal(held[0], key)
    assert torch.equal(held[1], value)
    assert (cache.start, cache.length) == (0, 5)
    assert str(cache) == "KeyValueCache(length=5, key (2, 5, 4), torch.float32)"


@pytest.mark.parametrize("branched", [copy.copy, copy.deepcopy])
@pytest.mark.parametrize("keep", [None, 3])
@pytest.mark.parametrize("library", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])
def test_branches_of_a_cache_do_not_write_into_one_another(library, keep, branched):
    x = library(np.random.default_rng(0).standard_normal((2, 9, 4)).astype(np.float32))
    cache = KeyValueCache(keep, capacity=20)
    assert branched(cache).length == 0
    cache.append(x[:, :4], x[:, :4])
    branch = branched(cache)
    kept, _ = cache.append(x[:, 4:5], x[:, 4:5])
    other, _ = branch.append(x[:, 6:7], x[:, 6:7])
    longer, _ = cache.append(x[:, 5:6], x[:, 5:6])
    np.testing.assert_array_equal(kept, x[:, :5])
    np.testing.assert_array_equal(longer, x[:, :6])
    np.testing.assert_array_equal(other[:, -1], x[:, 6])
    np.testing.assert_array_equal(other[:, :-1], x[:, branch.start : 4])
    assert (cache.length, branch.length) == (6, 5)


def test_keys_that_need_a_gradient_are_refused():
    layer = make()
    with pytest.raises(RuntimeError, match=r"a cache keeps none.*inference_mode"):
        layer(torch.rand(1, 2, 16, dtype=torch.float64), cache=layer.new_cache())


@torch.no_grad()
def test_a_cache_of_another_layer_or_batch_is_refused():
    cache = make().new_cache()
    x = torch.rand(2, 3, 16, dtype=torch.float64)
    make()(x, cache=cache)
    with pytest.raises(regard.ShapeError, match=r"key \(2, 2, 3, 4\) does not continue.*\(2, 4\)"):
        make(num_kv_heads=2)(x, cache=cache)
    with pytest.raises(regard.ShapeError, match=r"key \(1, 4, 3, 4\) does not continue"):
        make()(x[:1], cache=cache)
    with pytest.raises(TypeError, match=r"float32 on cpu, what is held torch.float64 on cpu"):
        make().float()(x.float(), cache=cache)
    assert cache.length == 3


@torch.no_grad()
def test_a_cache_that_keeps_less_than_the_layer_sees_is_refused():
    x, narrow = torch.randn(1, 1, 16, dtype=torch.float64), make(window=(3, 0)).new_cache()
    for wide, sees in (
        (make(window=(5, 0)), "5"),
        (make(window=(None, 0)), "all"),
        (make(), "all"),
    ):
        message = f"cache keeps 3 earlier tokens, and this layer sees {sees}. .*layer.new_cache"
        with pytest.raises(ValueError, match=message):
            wide(x, cache=narrow)
    assert make(window=(2, 0))(x, cache=narrow).shape == x.shape


@torch.no_grad()
def test_a_cache_that_another_layer_has_filled_is_refused():
    layer, other = make(), make()
    x, cache = torch.rand(1, 3, 16, dtype=torch.float64), layer.new_cache()
    layer(x, cache=cache)
    branches = [copy.copy(cache), copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))]
    for held in (cache, branches[0]):
        with pytest.raises(ValueError, match=r"holds the tokens of another layer. .*new_cache"):
            other(x, cache=held)
        assert held.length == 3
    found = layer(x, cache=cache)
    for branch in branches:
        assert torch.equal(layer(x, cache=branch), found)


@torch.no_grad()
def test_a_generation_compiles_into_one_graph():
    layer, x = make(rope=100.0), torch.rand(1, 5, 16, dtype=torch.float64)
    step = torch.compile(
        lambda x, cache: layer(x, cache=cache), backend="eager", fullgraph=True, dynamic=True
    )
    cache = layer.new_cache(5)
    found = torch.cat([step(x[:, :3], cache), step(x[:, 3:4], cache), step(x[:, 4:], cache)], 1)
    torch.testing.assert_close(found, layer(x))


@torch.no_grad()
@pytest.mark.parametrize("cache", [3, [KeyValueCache()], (torch.ones(1), torch.ones(1))])
def test_what_is_no_cache_is_told_the_way(cache):
    kind = type(cache).__name__
    with pytest.raises(TypeError, match=f"cache is an? {kind}; that of this layer is needed"):
        make()(torch.rand(1, 3, 16, dtype=torch.float64), cache=cache)


def test_each_key_needs_its_value():
    with pytest.raises(regard.ShapeError, match=r"key \(2, 4\) and value \(3, 4\) differ"):
        KeyValueCache().append(torch.ones(2, 4), torch.ones(3, 4))


def test_sizes_must_not_be_negative():
    with pytest.raises(ValueError, match="keep is None and capacity -1; neither may be negative"):
        make().new_cache(capacity=-1)
    with pytest.raises(ValueError, match="keep is -1 and capacity 0"):
        KeyValueCache(keep=-1)
    with pytest.raises(TypeError, match=r"cache: capacity is 2\.5, a float; an int is needed"):
        make().new_cache(capacity=2.5)
    with pytest.raises(TypeError, match="cache: keep is '3', a str; an int is needed"):
        KeyValueCache(keep="3")


@torch.no_grad()
def test_a_cache_is_for_causal_self_attention_without_padding():
    layer = make()
    x = torch.rand(1, 3, 16, dtype=torch.float64)
    with pytest.raises(ValueError, match="context takes their place; pass one of the two"):
        layer(x, x, cache=layer.new_cache())
    with pytest.raises(regard.UnsupportedError, match="Pad on the left, and hide the padding"):
        layer(x, key_lengths=torch.tensor([2]), cache=layer.new_cache())
    uncausal = MultiHeadAttention(16, 4)
    with pytest.raises(ValueError, match="a cache needs causal=True"):
        uncausal.new_cache()
    with pytest.raises(ValueError, match="a cache needs causal=True"):
        uncausal(x.float(), cache=KeyValueCache())
