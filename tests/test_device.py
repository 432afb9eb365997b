"""What calls do to a device, shown by one that is none: see ``stand``."""

import contextlib
import itertools
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel

import regard
import stand
import test_attention as plain
from regard._backends import kernel_ops, torch_ops, torch_questions, torch_reductions
from regard._base.torch_arrays import dtype_on
from regard._operator import attention as operator
from strategies import calls


def draw(*shape, n=3):
    return [torch.randn(shape) for _ in range(n)]


def everything(q, k, v, **options):
    """What there is of a call, by name."""
    out, weights = regard.attention(q, k, v, return_weights=True, **options)
    found = {"output": out, "rows": weights[0, 1, 3:5], "product": weights @ v}
    found |= weights.summary(topk=3, strongest=4, pool=(5, 7))._asdict()
    found |= {
        "blocks": weights.blocks(torch.arange(q.shape[2]) // 4, torch.arange(k.shape[2]) // 9)
    }
    found |= {"diagonals": weights.diagonals()[1], "statistics": weights.statistics}
    found |= {"mix": weights.mix() @ v[0, 0], "mass": weights.pool((3, 3), how="mass")}
    return found


def test_a_device_without_float64_computes_everything_but_float64():
    q, k, v = draw(2, 4, 24, 8)
    options = {"causal": True, "softcap": 3.0, "key_lengths": torch.tensor([24, 17])}
    with stand.device(float64=False):
        found = everything(*map(stand.on_device, (q, k, v)), **options)
    for name, expected in everything(q, k, v, **options, backend="torch").items():
        for x, y in zip(stand.leaves(found[name]), stand.leaves(expected)):
            torch.testing.assert_close(stand.on_cpu(x), y, rtol=1e-5, atol=2e-6, equal_nan=True)


def test_a_device_says_whether_it_has_float64(monkeypatch):
    has = SimpleNamespace(has_fp64=False)
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda device: has)
    for name, wide in (("mps", False), ("xpu", False), ("cuda", True), ("cpu", True)):
        found = dtype_on(torch.device(name), "float64")
        assert found == (torch.float64 if wide else torch.float32)
        assert dtype_on(torch.device(name), "float16") == torch.float16
    has.has_fp64 = True
    assert dtype_on(torch.device("xpu"), "float64") == torch.float64


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, torch.AcceleratorError, RuntimeError])
def test_an_error_of_the_fused_operator_is_not_hidden_by_another_way(error):
    def fail(*_, **__):
        raise error("CUDA out of memory. Tried to allocate 2.00 GiB.")

    x = stand.on_device(torch.randn(1, 2, 24, 8))
    with stand.device(fused=fail), pytest.raises(error, match="out of memory"):
        regard.attention(x, x, x)


def test_where_torch_has_no_kernel_blocks_of_rows_serve():
    x, operator = torch.randn(1, 4, 24, 8), torch.nn.functional.scaled_dot_product_attention

    def refuse(*_, **__):
        with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION]):  # which the CPU lacks: torch's words
            operator(x, x, x)

    with stand.device(fused=refuse) as seen:
        out = regard.attention(*3 * [stand.on_device(x)])
    assert seen.operations["bmm"] == 2
    torch.testing.assert_close(stand.on_cpu(out), regard.attention(x, x, x, backend="torch"))


def test_scores_that_overflow_in_float32_are_left_to_blocks_of_rows():
    """The bound is computed in the dtype of sums: what overflows it is large, or 0 times that."""
    q, k = torch.full((2, 1, 20, 4), 1e25), torch.full((2, 1, 20, 4), 1e25)
    k[1] = 0.0
    call = operator.read_call(q, k, k, causal=True)
    assert torch_ops._fuses_exactly(call).tolist() == [False, True]
    call = operator.read_call(q, k, k, causal=True, scale=1e200)
    assert torch_ops._fuses_exactly(call).tolist() == [False, False]
    call = operator.read_call(q, k, k)
    assert torch_ops._fuses_exactly(call) is None
    assert torch_ops._fuses_exactly(call, differentiates=True).tolist() == [False, True]


def test_no_cuda_graph_holds_an_operator_that_looks_into_its_tensors():
    modules = torch_ops, kernel_ops, torch_questions, torch_reductions
    assert all(modules)
    assert len(torch_ops.OPERATORS) > 8
    for name in torch_ops.OPERATORS:
        operator = getattr(torch.ops.regard, name).default
        assert torch.Tag.cudagraph_unsafe in operator.tags, name


B, H, D = 2, 4, 8


class Inputs:
    """Tensors of one length, on the device; what the host knows is on the CPU."""

    def __init__(self, length):
        generator = torch.Generator().manual_seed(0)
        self.q, self.k, self.v, self.grad = (
            stand.on_device(torch.randn(B, H, length, D, generator=generator)) for _ in range(4)
        )
        self.length, self.ids = length, torch.arange(length) // 9
        self.mask = stand.on_device(torch.rand(length, length, generator=generator) < 0.5)
        self.bias = stand.on_device(torch.randn(H, 1, length, generator=generator))
        self.sinks = stand.on_device(torch.randn(H, generator=generator))

    def attend(self, **options):
        return regard.attention(self.q, self.k, self.v, **options)

    def differentiate(self, **options):
        leaves = [x.detach().requires_grad_() for x in (self.q, self.k, self.v)]
        out = regard.attention(*leaves, **options)
        return torch.autograd.grad(out, leaves, self.grad)

    @property
    def weights(self):
        return regard.AttentionWeights(self.q, self.k, causal=True)


EDITS = [regard.Edit(0, slice(2, 5), slice(0, 3), 0.0), regard.Edit(1, slice(3), slice(2), 2.0)]
FIRST = torch.arange(B)
# A call, and how often the host waits for the device or uploads; by default never.
CALLS = {
    "plain": lambda x: x.attend(),
    "scale": lambda x: x.attend(scale=0.3),
    "bias": lambda x: x.attend(bias=x.bias),
    "softcap": lambda x: x.attend(softcap=3.0),
    "sinks": lambda x: x.attend(sinks=x.sinks),
    "dropout": lambda x: x.attend(dropout=0.1, seed=3),
    "statistics": lambda x: x.attend(softcap=3.0, return_statistics=True),
    "rows": lambda x: x.weights[0, 1, 3],
    "columns": lambda x: x.weights[..., 5:9],
    "lse": lambda x: x.weights.lse,
    "max score": lambda x: x.weights.max_score,
    "entropy": lambda x: x.weights.entropy(),
    "distance": lambda x: x.weights.distance(),
    "received": lambda x: x.weights.received(),
    "received, largest": lambda x: x.weights.received(how="max"),
    "topk": lambda x: x.weights.topk(3),
    "strongest": lambda x: x.weights.strongest(5),
    "pool": lambda x: x.weights.pool((9, 7)),
    "pool of a part": lambda x: x.weights.part(slice(1, None, 3)).pool((9, 7), of=2 * (x.length,)),
    "summary": lambda x: x.weights.summary(topk=3, strongest=5, pool=(5, 5)),
    "mix": lambda x: x.weights.mix()[0, 3],
}
# Whether masked values are finite, or torch's operator exact, is read: once a call.
READS = {
    "causal": lambda x: x.attend(causal=True),
    "mask": lambda x: x.attend(mask=x.mask),
    "window": lambda x: x.attend(window=(5, 3)),
    "edits": lambda x: x.attend(edits=EDITS),
    "query start": lambda x: x.attend(query_start=3, causal=True),
    "several starts": lambda x: x.attend(query_start=FIRST, causal=True),
    "gradient": lambda x: x.differentiate(),
    "gradient, causal": lambda x: x.differentiate(causal=True),
    "product": lambda x: x.weights @ x.v,
    "transposed": lambda x: x.weights.T @ x.v,
}
# Waits and uploads. What the host was given and the device needs is uploaded.
OTHERS = {
    "key lengths": (1, 1, lambda x: x.attend(key_lengths=FIRST + 7)),
    "lengths and order": (1, 0, lambda x: x.attend(key_lengths=FIRST + 7, causal=True)),
    "gradient, window": (2, 0, lambda x: x.differentiate(window=(5, 3))),
    "segments": (3, 1, lambda x: x.attend(segments=x.ids)),
    "intervals": (3, 2, lambda x: x.attend(intervals=(x.ids, x.ids + 5))),
}


def seen_of(call, length):
    inputs = Inputs(length)
    with stand.device() as seen:
        call(inputs)
    return seen


COUNTED = (
    {name: (0, 0, call) for name, call in CALLS.items()}
    | {name: (1, 0, call) for name, call in READS.items()}
    | OTHERS
)


@pytest.mark.parametrize("name", COUNTED)
def test_the_host_waits_for_the_device_as_often_as_is_known_at_any_length(name):
    waits, uploads, call = COUNTED[name]
    for length in (40, 400):  # one block of rows, and several
        seen = seen_of(call, length)
        assert sum(seen.waits.values()) == waits, seen.waits
        assert sum(seen.uploads.values()) == uploads, seen.uploads


def test_the_fused_operator_is_the_only_launch_of_a_plain_call():
    for length in (40, 400):
        assert seen_of(CALLS["plain"], length).operations == {"scaled_dot_product_attention": 1}


@contextlib.contextmanager
def all_on_the_device(own=operator.attention):
    """Calls of attention with tensors of the CPU are computed there, and come back to the CPU."""

    def attention(query, key, value, *, backend="auto", **options):
        if not torch.is_tensor(query):
            return own(query, key, value, backend=backend, **options)
        arrays = map(stand.on_device, (query, key, value))
        options = {name: stand.on_device(x) for name, x in options.items()}
        found = own(*arrays, **options)
        return stand.on_cpu(found) if torch.is_tensor(found) else (stand.on_cpu(found[0]), found[1])

    patches = (mock.patch.object(x, "attention", attention) for x in (regard, operator))
    with next(patches), next(patches), stand.device() as seen:
        yield seen


CASES = plain.TestScaledDotProductAttention.CASES
LENGTHS = [(97, 97), (1, 1025), (97, 1025), (1025, 97)]
REPLAYED = {
    **{
        f"{lengths} {causal}": lambda case=(causal, lengths): (
            plain.test_awkward_lengths_match_the_definition("torch", *case)
        )
        for causal, lengths in itertools.product([False, True], LENGTHS)
    },
    **{
        f"leading {leading}": lambda leading=leading: (
            plain.test_any_leading_axes_give_what_each_gives_alone(leading, torch.from_numpy)
        )
        for leading in [(), (2,), (3, 2)]
    },
    **{
        f"as torch {n} {mask}": lambda case=(case, mask): (
            plain.TestScaledDotProductAttention().test_equals_torch(*case)
        )
        for (n, case), mask in itertools.product(enumerate(CASES), [None, "bool", "float"])
    },
    **{
        f"empty {shape}": lambda shape=shape: plain.test_empty_axes_give_empty_or_zero_outputs(
            shape, torch.from_numpy
        )
        for shape in [(0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4)]
    },
    "seed": lambda: plain.test_the_seed_decides_the_dropout_in_every_backend_alike("torch"),
    "generator": plain.test_dropout_without_a_seed_follows_torchs_generator,
}


@pytest.mark.parametrize("name", REPLAYED)
def test_the_calls_of_the_tests_of_attention_leave_nothing_on_the_cpu(name):
    with all_on_the_device():
        REPLAYED[name]()


@settings(max_examples=40, deadline=None)
@given(calls(), st.sampled_from(plain.DTYPES))
def test_calls_with_all_options_together_leave_nothing_on_the_cpu(call, dtype):
    matches = plain.test_torch_matches_the_definition_with_all_options_together
    with all_on_the_device():
        matches.hypothesis.inner_test(call, dtype, "torch")
