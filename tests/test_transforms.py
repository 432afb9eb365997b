"""What torch does to a function: compile it, map it, trace it with fake tensors."""

import functools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import regard
from layouts import strides
from regard import Edit
from regard._backends import kernel_ops  # noqa: F401 - which registers its operators
from regard._backends.torch_ops import pack
from regard._call.checks import read_call

pytestmark = pytest.mark.usefixtures("by_both_backends")


@pytest.fixture
def qkv():
    torch.manual_seed(0)
    return [torch.randn(2, 4, 33, 16) for _ in range(3)]


OPTIONS = {
    "none": {},
    "causal": {"causal": True},
    "window": {"window": (5, None), "softcap": 30.0, "key_lengths": torch.tensor([33, 20])},
    "segments": {"segments": torch.arange(33) // 10, "causal": True},
    "intervals": {"intervals": (torch.arange(33) // 2, torch.arange(33) + 4)},
    "mask": {"mask": torch.ones(33, 33, dtype=torch.bool).tril()},
    "edits": {"edits": [Edit(1, slice(3, 20), slice(5)), Edit(None, -1, None, 2.0)]},
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


def test_changing_lengths_that_disagree_are_told(qkv):
    q, k, v = (x[:, :, :length] for x, length in zip(qkv, (6, 7, 5)))
    module = torch.nn.Module()
    module.forward = lambda *arrays: regard.attention(*arrays)
    torch._dynamo.reset()
    with pytest.raises(regard.ShapeError, match="7 keys and 5 values; each key needs its own"):
        torch.compile(module.forward, dynamic=True, backend="eager")(q, k, v)
    lengths = (({2: torch.export.Dim.AUTO},) * 3,)
    with pytest.raises(regard.ShapeError, match="7 keys and 5 values; each key needs its own"):
        torch.export.export(module, (q, k, v), dynamic_shapes=lengths)


def test_edits_with_open_ends_are_compiled_once_for_all_lengths(qkv):
    def attend(q, k, v):
        edits = [Edit(1, slice(2, None), slice(3)), Edit(keys=0, factor=2.0)]
        return regard.attention(q, k, v, causal=True, edits=edits)

    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for length in (5, 9, 33):
            q, k, v = (x[:, :, :length].contiguous() for x in qkv)
            torch.testing.assert_close(compiled(q, k, v), attend(q, k, v))


def test_compile_with_dropout_draws_anew_each_time(qkv):
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda q, k, v: regard.attention(q, k, v, dropout=0.5), fullgraph=True, backend="aot_eager"
    )
    assert not torch.equal(compiled(*qkv), compiled(*qkv))


@pytest.mark.parametrize("name", [*OPTIONS, "sinks", "dropout"])
@pytest.mark.parametrize("differentiates", [False, True])
def test_vmap_gives_the_bits_of_the_plain_calls(qkv, name, differentiates):
    options = OPTIONS.get(name, {"sinks": torch.ones(4), "bias": torch.ones(4, 1, 33)})
    if name == "dropout":
        options = {"dropout": 0.5, "seed": 3}
    q, k, v = (torch.stack([x, x.flip(0), x * 2]).requires_grad_(differentiates) for x in qkv)
    mapped = torch.vmap(lambda q, k, v: regard.attention(q, k, v, **options))(q, k, v)
    looped = torch.stack([regard.attention(*each, **options) for each in zip(q, k, v)])
    torch.testing.assert_close(mapped, looped, rtol=0, atol=0)
    if differentiates:
        grads = (torch.autograd.grad(out.square().sum(), (q, k, v)) for out in (mapped, looped))
        for x, y in zip(*grads):
            torch.testing.assert_close(x, y, rtol=1e-3, atol=2e-4)
    nested = torch.vmap(torch.vmap(lambda q, k, v: regard.attention(q, k, v, **options)))
    twice = nested(*(x[None] for x in (q, k, v)))
    torch.testing.assert_close(twice[0], looped, rtol=0, atol=0)


def test_vmap_is_run_by_the_kernels_where_they_are_named(qkv):
    attend = functools.partial(regard.attention, backend="kernel")
    mapped = torch.vmap(attend)(*(x[None] for x in qkv))
    torch.testing.assert_close(mapped[0], attend(*qkv), rtol=0, atol=0)


def test_vmap_over_nothing_and_of_nothing(qkv):
    q, k, v = qkv

    def of_query(q):
        return regard.attention(q, k, v, causal=True)

    assert torch.vmap(of_query)(torch.empty(3, 2, 4, 0, 16)).shape == (3, 2, 4, 0, 16)
    none = torch.vmap(regard.attention)(*(torch.empty(3, 0, 4, 33, 16) for _ in range(3)))
    assert none.shape == (3, 0, 4, 33, 16)
    empty = torch.vmap(lambda q, k, v: regard.attention(q, k[..., :0, :], v[..., :0, :]))
    assert (empty(*(x[None] for x in (q, k, v))) == 0).all()


@pytest.mark.parametrize("differentiates", [False, True])
def test_compile_gives_the_bits_of_the_plain_call(qkv, differentiates):
    inputs = [x.requires_grad_(differentiates) for x in qkv]

    def attend(q, k, v):
        return regard.attention(q, k, v, causal=True, window=(20, 0))

    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")(*inputs)
    torch.testing.assert_close(compiled, attend(*inputs), rtol=0, atol=0)
    if differentiates:
        grads = (torch.autograd.grad(f.sum(), inputs) for f in (compiled, attend(*inputs)))
        for x, y in zip(*grads):
            torch.testing.assert_close(x, y, rtol=0, atol=0)


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


def test_vmap_over_sinks(qkv):
    sinks = torch.randn(3, 4)
    mapped = torch.vmap(lambda s: regard.attention(*qkv, sinks=s))(sinks)
    looped = torch.stack([regard.attention(*qkv, sinks=s) for s in sinks])
    torch.testing.assert_close(mapped, looped)


def score(q, k, v, bias=None, sinks=None, **options):
    """One number that attention leads to, and whose second derivatives are not zero."""
    return regard.attention(q, k, v, bias=bias, sinks=sinks, **options).square().sum()


def differentiate(options, *inputs):
    """The gradient of the score by autograd, outside of all transforms."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    return torch.autograd.grad(score(*inputs, **options), inputs)


# torch.func uses what torch has deprecated.
func = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")


@func
@pytest.mark.parametrize("name", [*OPTIONS, "dropout"])
def test_func_grad_and_vjp_equal_autograd(qkv, name):
    options = OPTIONS.get(name, {"dropout": 0.3, "seed": 4})
    inputs = [*qkv, torch.randn(2, 4, 33, 33), torch.randn(4)]
    for given in (inputs[:3], inputs):
        expected = differentiate(options, *given)
        argnums = tuple(range(len(given)))
        grads = torch.func.grad(lambda *x: score(*x, **options), argnums)(*given)
        value, vjp = torch.func.vjp(lambda *x: score(*x, **options), *given)
        assert value.shape == ()
        for x, y, z in zip(grads, vjp(torch.ones(())), expected):
            torch.testing.assert_close(x, z, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(x, y)


@func
def test_func_grad_under_vmap_is_the_gradient_of_each(qkv):
    _, k, v = qkv
    q = torch.randn(3, 2, 4, 33, 16)
    inputs = [k[:1], v[:1], torch.randn(4, 33, 33), torch.randn(4)]  # shared, also by the batch
    options = {"causal": True, "dropout": 0.2, "seed": 3}
    grad = torch.func.grad(lambda *x: score(*x, **options), (0, 1, 2, 3, 4))
    mapped = torch.vmap(grad, in_dims=(0, None, None, None, None))(q, *inputs)
    for i in range(3):
        for x, y in zip(mapped, differentiate(options, q[i], *inputs)):
            torch.testing.assert_close(x[i], y, rtol=1e-4, atol=1e-5)


@func
def test_func_grad_of_vmap_is_the_gradient_of_all(qkv):
    q = torch.randn(3, 2, 4, 33, 16)

    def total(q, k):
        return torch.vmap(lambda q: score(q, k, qkv[2], causal=True))(q).sum()

    grads = torch.func.grad(total, (0, 1))(q, qkv[1])
    each = [differentiate({"causal": True}, x, *qkv[1:]) for x in q]
    torch.testing.assert_close(grads[0], torch.stack([x[0] for x in each]), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(grads[1], sum(x[1] for x in each), rtol=1e-4, atol=1e-4)


@func
@pytest.mark.parametrize("length", [5, 17])
def test_func_second_derivatives_equal_autograd(length):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, length, 2, dtype=torch.float64) for _ in range(3))

    def of_query(q):
        return score(q, k, v, causal=True)

    exact = torch.autograd.functional.hessian(of_query, q)
    hessian = torch.func.jacrev(torch.func.jacrev(of_query))(q)
    torch.testing.assert_close(hessian, exact)
    penalty = torch.func.grad(lambda q: torch.func.grad(of_query)(q).square().sum())(q)
    x = q.clone().requires_grad_()
    (first,) = torch.autograd.grad(of_query(x), x, create_graph=True)
    torch.testing.assert_close(penalty, *torch.autograd.grad(first.square().sum(), x))


def test_gradients_of_many_at_once(qkv):
    q = qkv[0][:, :, :4].clone().requires_grad_()
    out = regard.attention(q, *qkv[1:], window=(9, 0))
    many = torch.randn(3, *out.shape)
    (batched,) = torch.autograd.grad(out, q, many, is_grads_batched=True, retain_graph=True)
    for x, upstream in zip(batched, many):
        torch.testing.assert_close(x, *torch.autograd.grad(out, q, upstream, retain_graph=True))


@func
def test_a_third_derivative_is_refused(qkv):
    q = qkv[0].clone().requires_grad_()
    out = regard.attention(q, *qkv[1:])
    (first,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), q, create_graph=True)
    with pytest.raises(regard.UnsupportedError, match="first and second derivatives and no third"):
        torch.autograd.grad(second.sum(), q)
    f = score
    for _ in range(3):
        f = torch.func.grad(lambda *x, f=f: f(*x).square().sum())
    with pytest.raises(regard.UnsupportedError, match="first and second derivatives and no third"):
        f(*qkv)


@func
def test_forward_mode_over_a_gradient_is_refused_not_zero(qkv):
    q, k, v = (x[:, :, :4] for x in qkv)
    with pytest.raises(regard.UnsupportedError, match=r"jacrev\(jacrev\(f\)\) for a hessian"):
        torch.func.hessian(lambda q: score(q, k, v))(q)
    q = q.clone().requires_grad_()
    out = regard.attention(q, k, v)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(torch.ones_like(out), torch.ones_like(out))
        with pytest.raises(regard.UnsupportedError, match="no forward-mode derivative"):
            torch.autograd.grad(out, q, dual)


@func
@pytest.mark.parametrize("name", ["none", "window"])
def test_compile_takes_func_grad_and_vmap_of_it(qkv, name):
    torch._dynamo.reset()
    grad = torch.func.grad(lambda *x: score(*x, **OPTIONS[name]), (0, 1, 2))
    compiled = torch.compile(grad, fullgraph=True, backend="aot_eager")
    for x, y in zip(compiled(*qkv), grad(*qkv)):
        torch.testing.assert_close(x, y)
    many = [torch.stack([x, x.flip(0)]) for x in qkv]
    compiled = torch.compile(torch.vmap(grad), fullgraph=True, backend="aot_eager")
    for x, y in zip(compiled(*many), torch.vmap(grad)(*many)):
        torch.testing.assert_close(x, y)


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
    bias, sinks = torch.randn(6, 6, requires_grad=True), torch.randn(4, requires_grad=True)
    edits = [Edit(0, slice(1, 4), 2), Edit(None, 5, slice(3), 2.0)]
    call = read_call(q, k, v, causal=True, softcap=4.0, bias=bias, sinks=sinks, edits=edits)
    values = pack(call)
    torch.library.opcheck(torch.ops.regard.attention.default, values)
    grad = torch.randn(2, 4, 6, 16, requires_grad=True)
    for needed in (0b11111, 0b01001):  # of query and bias alone
        operator = torch.ops.regard.attention_backward.default
        torch.library.opcheck(operator, [needed, grad, *values])
    firsts = [torch.randn_like(x, requires_grad=True) for x in (q, k, v, call.bias, sinks)]
    operator = torch.ops.regard.attention_double_backward.default
    # Its gradient is a third derivative.
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(operator, [*firsts, grad, *values], test_utils=tests)
    torch.library.opcheck(torch.ops.regard.kernel_attention.default, values)
    saved = [x.detach() for x in torch.ops.regard.kernel_attention(*values)]
    operator = torch.ops.regard.kernel_attention_backward.default
    values = [x.detach() if isinstance(x, torch.Tensor) else x for x in values]
    for needed in (0b11111, 0b01001):
        torch.library.opcheck(operator, [needed, grad.detach(), *saved, *values])


@pytest.mark.parametrize("options", [{"causal": True}, {"softcap": 2.0}], ids=["fused", "blocks"])
def test_results_lie_in_memory_as_a_compiler_is_told(options):
    ops = torch.ops.regard
    inputs = torch.randn(3, 2, 40, 4, 8)
    bias = torch.randn(40, 40)
    for q, k, v in (inputs.transpose(2, 3), torch.randn(2, 40, 4, 24).transpose(1, 2).chunk(3, -1)):
        for more in ({}, {"bias": bias}):
            call = read_call(q, k, v, **options, **more)
            values = pack(call)
            saved = ops.kernel_attention(*values)
            firsts = [q, k, v, call.bias if more else q.new_empty(0), q.new_empty(0)]
            for operator, given in (
                (ops.attention, values),
                (ops.attention_backward, [15 if more else 7, q, *values]),
                (ops.attention_double_backward, [*firsts, q, *values]),
                (ops.kernel_attention, values),
                (ops.kernel_attention_backward, [15 if more else 7, q, *saved, *values]),
                (ops.kernel_attention_backward, [7, q / 0, *saved, *values]),  # by torch's path
            ):
                found, told = strides(operator, *given)
                assert found == told, operator


def test_tensors_of_another_default_device_or_dtype_do_not_matter(qkv):
    torch.set_default_dtype(torch.float64)
    try:
        out, weights = regard.attention(*qkv, window=(9, 0), return_weights=True)
    finally:
        torch.set_default_dtype(torch.float32)
    assert out.dtype == weights[0, 0].dtype == weights.received().dtype == torch.float32
