"""What calls do to a device, shown by one that is none: see ``stand``."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import regard
import stand
from regard._backends import kernel_ops, torch_ops, torch_questions, torch_reductions
from regard._base.torch_arrays import dtype_on


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
    call = regard._operator.attention.read_call(q, k, k, causal=True)
    assert torch_ops._fuses_exactly(call).tolist() == [False, True]
    call = regard._operator.attention.read_call(q, k, k, causal=True, scale=1e200)
    assert torch_ops._fuses_exactly(call).tolist() == [False, False]
    call = regard._operator.attention.read_call(q, k, k)
    assert torch_ops._fuses_exactly(call) is None
    assert torch_ops._fuses_exactly(call, differentiates=True).tolist() == [False, True]


def test_no_cuda_graph_holds_an_operator_that_looks_into_its_tensors():
    modules = torch_ops, kernel_ops, torch_questions, torch_reductions
    assert all(modules)
    names = [name for name in torch._library.custom_ops.OPDEFS if name.startswith("regard::")]
    assert len(names) > 8
    for name in names:
        operator = getattr(torch.ops.regard, name.removeprefix("regard::")).default
        assert torch.Tag.cudagraph_unsafe in operator.tags, name
