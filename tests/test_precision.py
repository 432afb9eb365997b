"""Neither autocast nor a lower precision of torch's products reaches what regard computes."""

import contextlib
import threading

import pytest
import torch

import regard
from regard._backends import torch_ops
from regard._base import torch_state

OPTIONS = {
    "fused": {"causal": True},
    "in blocks": {"window": (9, 4), "softcap": 5.0, "bias": torch.linspace(-1, 1, 33)},
}
MATMUL = torch.backends.mkldnn.matmul, torch.backends.cuda.matmul


@pytest.fixture(autouse=True)
def own_precision():
    yield
    torch.set_float32_matmul_precision("highest")
    for setting in (*MATMUL, torch.backends.mkldnn, torch.backends):
        setting.fp32_precision = "none"


@contextlib.contextmanager
def autocast():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        yield


@contextlib.contextmanager
def precision(name):
    torch.set_float32_matmul_precision(name)
    yield
    assert torch.get_float32_matmul_precision() == name
    torch.set_float32_matmul_precision("highest")


def settings():
    return {"autocast": autocast, "medium": lambda: precision("medium"),
            "high": lambda: precision("high")}  # fmt: skip


everywhere = pytest.mark.parametrize("setting", settings())
every_call = pytest.mark.parametrize("name", OPTIONS)


def draw(*shape):
    return [torch.randn(shape).requires_grad_() for _ in range(3)]


def everything(inputs, **options):
    """Output, weights, first and second gradients."""
    out, weights = regard.attention(*inputs, backend="torch", return_weights=True, **options)
    plain = torch.autograd.grad(out.square().sum(), inputs, retain_graph=True)
    first = torch.autograd.grad(out.square().sum(), inputs, create_graph=True)
    # outside of attention the process's settings hold: no product there
    second = torch.autograd.grad(sum(x.square().sum() for x in first), inputs)
    asked = weights[...], weights.entropy(), weights.received(), weights.lse
    return [out, *plain, *first, *second, *asked]


@everywhere
@every_call
def test_nothing_changes(name, setting):
    inputs = draw(2, 4, 33, 16)
    expected = everything(inputs, **OPTIONS[name])
    with settings()[setting]():
        found = everything(inputs, **OPTIONS[name])
    for x, y in zip(found, expected):
        assert x.dtype == y.dtype
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)  # two ways to the same gradient


def asked(backend, **options):
    """What is asked of weights, and its gradients."""
    torch.manual_seed(0)
    q, k = (torch.randn(2, L, 40).requires_grad_() for L in (33, 40))
    x, y, value = (torch.randn(2, L, 12).requires_grad_() for L in (40, 33, 40))
    other = regard.AttentionWeights(2 * q.detach(), k.detach(), backend=backend)
    weights = regard.AttentionWeights(q, k, backend=backend, **options)
    given = {
        "product": weights @ x, "transposed": weights.T @ y, "rows": weights[:, 3:9],
        "blocks": weights.blocks(torch.arange(33) // 5, torch.arange(40) // 7),
        "diagonals": weights.diagonals()[1], "distance": weights.distance(),
        "divergence": regard.divergence(weights, other, "kl"), "score": weights.max_score,
        "pairs": weights.at(torch.arange(9), torch.arange(9)),
    }  # fmt: skip
    found = dict(given)
    for name, out in given.items():
        grad = torch.randn(out.shape)
        own = torch.autograd.grad(out, (q, k, x, y), grad, allow_unused=True)
        found |= {f"{name}, gradient {n}": z for n, z in enumerate(own) if z is not None}
    with torch.no_grad():
        effects = weights.effects(value, torch.randn(2, 33, 12))
        found["effects"], found["mix"] = effects[...], weights.mix() @ x[0]
        out, rows = regard.attention(
            q, k, value, return_statistics=True, backend=backend, **options
        )
        part = regard.attention_gradients(q, k, value, out, rows, y, backend=backend, **options)
        found |= {f"part {n}": z for n, z in enumerate(part) if z is not None}
    return {name: x.detach() for name, x in found.items()}


@everywhere
@pytest.mark.parametrize("backend", ["torch", "kernel"])
def test_nothing_that_is_asked_of_weights_changes(backend, setting):
    expected = asked(backend, causal=True)
    with settings()[setting]():
        found = asked(backend, causal=True)
    assert found.keys() == expected.keys()
    for name, x in found.items():
        assert x.dtype == torch.float32, name
        error = abs(x - expected[name]).max() / abs(expected[name]).max()
        assert error < 1e-5, name


@everywhere
@every_call
def test_no_product_runs_below_its_dtype(name, setting, monkeypatch):
    """On every processor, also where torch would not make use of what it is allowed."""
    products, fused = [], torch_ops.scaled_dot_product_attention

    def look():
        products.append((torch.is_autocast_enabled("cpu"), *(x.fp32_precision for x in MATMUL)))

    def multiply(x, y, own=torch.Tensor.__matmul__):
        look()
        return own(x, y)

    def attend(*inputs, **options):
        look()
        return fused(*inputs, **options)

    monkeypatch.setattr(torch.Tensor, "__matmul__", multiply)
    monkeypatch.setattr(torch_ops, "scaled_dot_product_attention", attend)
    inputs = draw(2, 4, 33, 16)
    with settings()[setting]():
        everything(inputs, **OPTIONS[name])
    exact = {"none", "ieee"}
    assert len(products) > 5
    assert all(not cast and {cpu, cuda} <= exact for cast, cpu, cuda in products)


def test_the_gradient_of_the_fused_operator_is_not_left_to_a_lower_precision(monkeypatch):
    """torch computes that one in its own time, after any guard: so it is computed by ours."""
    computed = []
    monkeypatch.setattr(
        torch_ops, "_differentiate", lambda *x, own=torch_ops._differentiate: (
            computed.append(1), own(*x))[1],
    )  # fmt: skip
    inputs = draw(1, 2, 33, 16)
    out = regard.attention(*inputs, backend="torch")
    with autocast():
        torch.autograd.grad(out.sum(), inputs, retain_graph=True)
    assert computed
    computed.clear()
    torch.autograd.grad(out.sum(), inputs)
    assert not computed


def test_heads_too_large_for_the_kernels_are_exact_too():
    q, k, v = (torch.randn(1, 2, 20, 300) for _ in range(3))
    expected = regard.attention(q, k, v)
    for name in settings():
        with settings()[name]():
            torch.testing.assert_close(regard.attention(q, k, v), expected, rtol=1e-5, atol=1e-6)
            weights = regard.AttentionWeights(q, k)
            ones = torch.ones(1, 2, 20)
            torch.testing.assert_close(weights[...].sum(-1), ones, rtol=1e-6, atol=1e-6)


def test_the_drop_in_computes_in_the_dtype_that_autocast_asks_for_and_exactly_in_that():
    q, k, v = (torch.randn(2, 4, 33, 16) for _ in range(3))
    narrow = [x.bfloat16() for x in (q, k, v)]
    expected = regard.attention(*narrow)
    with autocast():
        out = regard.scaled_dot_product_attention(q, k, v)
        assert regard.attention(q, k, v).dtype == torch.float32
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, expected, rtol=0, atol=0)


SET = {
    "the older interface": lambda: torch.set_float32_matmul_precision("medium"),
    "one product": lambda: setattr(MATMUL[0], "fp32_precision", "bf16"),
    "a device": lambda: setattr(torch.backends.mkldnn, "fp32_precision", "tf32"),
    "all": lambda: setattr(torch.backends, "fp32_precision", "tf32"),
    "two that disagree": lambda: (
        torch.set_float32_matmul_precision("high"), setattr(MATMUL[0], "fp32_precision", "bf16")),
}  # fmt: skip


def told():
    """What is set, and what would be if the setting that holds for all became another."""
    found = [x.fp32_precision for x in (*MATMUL, torch.backends)]
    torch.backends.fp32_precision = "bf16" if found[-1] == "tf32" else "tf32"
    found += [x.fp32_precision for x in MATMUL]
    torch.backends.fp32_precision = found[2]
    with contextlib.suppress(RuntimeError):
        found.append(torch.get_float32_matmul_precision())
    return found


@pytest.mark.parametrize("name", SET)
def test_what_the_process_has_set_is_put_back(name):
    SET[name]()
    before = told()
    with torch_state.exact("cpu"), torch_state.exact("cpu"):
        assert {x.fp32_precision for x in MATMUL} == {"ieee"}
    assert told() == before
    with pytest.raises(ZeroDivisionError), torch_state.exact("cpu"):
        raise ZeroDivisionError
    assert told() == before


def test_threads_that_overlap_leave_what_the_first_found():
    torch.set_float32_matmul_precision("medium")
    first_is_in, second_is_in, first_is_out = (threading.Event() for _ in range(3))
    seen = []

    def second():
        first_is_in.wait()
        with torch_state.exact("cpu"):
            second_is_in.set()
            first_is_out.wait()
            seen.append(MATMUL[0].fp32_precision)

    thread = threading.Thread(target=second)
    thread.start()
    with torch_state.exact("cpu"):
        first_is_in.set()
        second_is_in.wait()
    first_is_out.set()
    thread.join()
    assert seen == ["ieee"]
    assert torch.get_float32_matmul_precision() == "medium"
    assert MATMUL[0].fp32_precision == "bf16"
