"""What torch does to a function: compile it, map it, trace it with fake tensors."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import regard


@pytest.fixture
def qkv():
    torch.manual_seed(0)
    return [torch.randn(2, 4, 33, 16) for _ in range(3)]


OPTIONS = {
    "none": {},
    "causal": {"causal": True},
    "window": {"window": (5, None), "softcap": 30.0, "key_lengths": torch.tensor([33, 20])},
    "segments": {"segments": torch.arange(33) // 10, "causal": True},
    "mask": {"mask": torch.ones(33, 33, dtype=torch.bool).tril()},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_compile_has_no_graph_break(qkv, name):
    def function(q, k, v, bias, sinks):
        return regard.attention(2 * q, k, v, bias=bias, sinks=sinks, **OPTIONS[name]) + 1

    inputs = [*qkv, torch.randn(33, 33), torch.randn(4)]
    for x in inputs:
        x.requires_grad_()
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")(*inputs)
    eager = function(*inputs)
    torch.testing.assert_close(compiled, eager)
    for x, y in zip(*(torch.autograd.grad(o.square().sum(), inputs) for o in (compiled, eager))):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)


# torch's own compiler uses what torch has deprecated.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
def test_compile_with_inductor_and_changing_lengths(qkv):
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda q, k, v: 2 * regard.attention(q, k, v, causal=True), fullgraph=True, dynamic=True
    )
    for length in (5, 9, 33):
        q, k, v = (x[:, :, :length] for x in qkv)
        torch.testing.assert_close(compiled(q, k, v), 2 * regard.attention(q, k, v, causal=True))


def test_compile_with_dropout_draws_anew_each_time(qkv):
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda q, k, v: regard.attention(q, k, v, dropout=0.5), fullgraph=True, backend="aot_eager"
    )
    assert not torch.equal(compiled(*qkv), compiled(*qkv))


@pytest.mark.parametrize("name", OPTIONS)
def test_vmap_over_every_tensor(qkv, name):
    q, k, v = (torch.stack([x, x.flip(0), x * 2]) for x in qkv)
    options = OPTIONS[name]
    mapped = torch.vmap(lambda q, k, v: regard.attention(q, k, v, **options))(q, k, v)
    looped = torch.stack([regard.attention(*each, **options) for each in zip(q, k, v)])
    torch.testing.assert_close(mapped, looped)


def test_vmap_over_some_axes_only(qkv):
    q, k, _ = qkv
    values = torch.randn(2, 4, 33, 3, 8)
    lengths = torch.tensor([[3, 33], [10, 0], [33, 5]])
    mapped = torch.vmap(
        lambda v, n: regard.attention(q, k, v, key_lengths=n, causal=True), in_dims=(3, 0)
    )(values, lengths)
    for i in range(3):
        alone = regard.attention(q, k, values[:, :, :, i], key_lengths=lengths[i], causal=True)
        torch.testing.assert_close(mapped[i], alone)


def test_vmap_over_seeds_is_what_each_seed_gives(qkv):
    seeds = torch.tensor([3, 1, 4])

    def drop(seed):
        return regard.attention(*qkv, dropout=0.5, seed=seed)

    looped = torch.stack([drop(seed) for seed in seeds])
    torch.testing.assert_close(torch.vmap(drop)(seeds), looped)
    twice = torch.vmap(torch.vmap(drop))(seeds[None])
    torch.testing.assert_close(twice[0], looped)
    same = torch.vmap(lambda q: regard.attention(q, *qkv[1:], dropout=0.5, seed=3))
    torch.testing.assert_close(same(torch.stack([qkv[0]] * 2))[1], looped[0])


# torch.func uses what torch has deprecated.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("length", [4, 33])
def test_forward_mode_derivatives_are_refused_not_zero(qkv, length):
    q, k, v = (x[:, :, :length] for x in qkv)

    def attend(x):
        return regard.attention(x, k, v)

    with pytest.raises(regard.UnsupportedError, match="no forward-mode derivative"):
        torch.func.jvp(attend, (q,), (q,))
    with pytest.raises(regard.UnsupportedError, match="no forward-mode derivative"):
        torch.func.jacfwd(attend)(q)
    with torch.autograd.forward_ad.dual_level():
        assert attend(q).shape == q.shape
        with pytest.raises(regard.UnsupportedError, match="no forward-mode derivative"):
            attend(torch.autograd.forward_ad.make_dual(q, q))


def test_vmap_over_sinks_is_refused(qkv):
    with pytest.raises(regard.UnsupportedError, match="vmap over sinks is not possible"):
        torch.vmap(lambda s: regard.attention(*qkv, sinks=s))(torch.randn(3, 4))


def test_fake_tensors_get_shapes_without_computing():
    with FakeTensorMode():
        q, k, v = torch.empty(2, 8, 33, 16), torch.empty(2, 2, 50, 16), torch.empty(2, 2, 50, 5)
        lengths = torch.empty(2, dtype=torch.int64)
        assert regard.attention(q, k, v, causal=True).shape == (2, 8, 33, 5)
        out = regard.attention(q, k, v, window=(3, 0), key_lengths=lengths, dropout=0.1)
        assert out.shape == (2, 8, 33, 5)


# The check itself reads .grad of tensors that it made.
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_the_operators_are_registered_soundly(qkv):
    q, k, v = (x[:, :, :6].contiguous().requires_grad_() for x in qkv)
    from regard import _checks, _torch_ops

    call = _checks.read_call(q, k, v, causal=True, softcap=4.0)
    torch.library.opcheck(torch.ops.regard.attention.default, _torch_ops._pack(call))


def test_tensors_of_another_default_device_or_dtype_do_not_matter(qkv):
    torch.set_default_dtype(torch.float64)
    try:
        out, weights = regard.attention(*qkv, window=(9, 0), return_weights=True)
    finally:
        torch.set_default_dtype(torch.float32)
    assert out.dtype == weights[0, 0].dtype == weights.received().dtype == torch.float32
