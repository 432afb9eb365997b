"""The forward pass beside other libraries': torch in four ways, onnxruntime, jax, plain NumPy.

    pip install -c constraints.txt -r benchmarks/requirements.txt
    python benchmarks/peers.py [--threads N] [--dtype float32] [--quick] [--json FILE]

What is not installed is left out, and a line says so. '-' says that a peer cannot do the job, and
the note below why. Inputs are made, models built and code compiled beforehand.
"""

import os
import sys
import textwrap
from importlib.util import find_spec

import common
import numpy as np
import torch
from forward import QUICK, SHAPES
from torch.nn.attention import SDPBackend, flex_attention, sdpa_kernel

import regard

ONNX_NAMES = {"float32": "FLOAT", "float64": "DOUBLE", "float16": "FLOAT16"}


class CannotError(Exception):
    """A peer does not do what was asked; its text says why."""


def with_regard(q, k, v, causal, threads):
    return lambda: regard.attention(q, k, v, causal=causal)


def with_torch(q, k, v, causal, threads):
    return lambda: common.torch_attention(q, k, v, causal)


def with_torch_plain(q, k, v, causal, threads):
    def run():
        with sdpa_kernel(SDPBackend.MATH):
            return common.torch_attention(q, k, v, causal)

    return run


def with_flex(q, k, v, causal, threads):
    torch.compiler.reset()  # a fresh compilation for every shape, none of them general
    compiled = torch.compile(flex_attention.flex_attention, dynamic=False)
    mask = None
    if causal:
        length = q.shape[2]
        mask = flex_attention.create_block_mask(
            lambda b, h, i, j: i >= j, None, None, length, length, device="cpu"
        )
    return lambda: compiled(q, k, v, block_mask=mask)


def onnx_session(node, threads, dtype, opsets):
    """A model of one operator on q, k and v."""
    import onnx
    import onnxruntime

    tensor = getattr(onnx.TensorProto, ONNX_NAMES[dtype])
    inputs, outputs = (
        [onnx.helper.make_tensor_value_info(name, tensor, None) for name in names]
        for names in (node.input, node.output)
    )
    graph = onnx.helper.make_graph([node], "attention", inputs, outputs)
    imports = [onnx.helper.make_opsetid(*opset) for opset in opsets]
    model = onnx.helper.make_model(graph, opset_imports=imports, ir_version=11)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(model.SerializeToString(), options)


def run_session(session, arrays):
    feed = dict(zip(("q", "k", "v"), arrays))
    return lambda: session.run(None, feed)[0]


def with_onnx_attention(q, k, v, causal, threads):
    """The standard's own operator, from opset 23."""
    import onnx

    arrays = arrays_of(q, k, v)
    node = onnx.helper.make_node("Attention", ["q", "k", "v"], ["out"], is_causal=int(causal))
    return run_session(onnx_session(node, threads, _dtype(q), [("", 23)]), arrays)


def with_onnx_contrib(q, k, v, causal, threads):
    """onnxruntime's operator: (B, L, H · D) in and out."""
    import onnx

    B, H, L, D = q.shape
    arrays = [x.transpose(0, 2, 1, 3).reshape(B, L, H * D) for x in arrays_of(q, k, v)]
    node = onnx.helper.make_node(
        "MultiHeadAttention", ["q", "k", "v"], ["out"], domain="com.microsoft",
        num_heads=H, unidirectional=int(causal),
    )  # fmt: skip
    session = onnx_session(node, threads, _dtype(q), [("", 23), ("com.microsoft", 1)])
    run = run_session(session, [np.ascontiguousarray(x) for x in arrays])
    return lambda: run().reshape(B, L, H, D).swapaxes(1, 2)


def with_jax(q, k, v, causal, threads):
    import jax

    jax.config.update("jax_enable_x64", q.dtype == torch.float64)
    attend = jax.jit(jax.nn.dot_product_attention, static_argnames="is_causal")
    dtype = _dtype(q)
    arrays = [jax.numpy.asarray(x.double().numpy().swapaxes(1, 2), dtype) for x in (q, k, v)]

    def run():
        out = attend(*arrays, is_causal=causal).block_until_ready()
        return np.asarray(out).swapaxes(1, 2)

    return run


def with_numpy(q, k, v, causal, threads):
    visible = np.tri(q.shape[2], dtype=bool) if causal else None
    arrays = arrays_of(q, k, v)
    return lambda: common.plain_numpy(*arrays, visible)


def arrays_of(*tensors):
    """NumPy's view of tensors."""
    if tensors[0].dtype == torch.bfloat16:
        raise CannotError("NumPy has no bfloat16")
    return [x.numpy() for x in tensors]


def _dtype(x):
    return str(x.dtype).removeprefix("torch.")


PEERS = {
    "regard": (with_regard, ()),
    "torch fused": (with_torch, ()),
    "torch plain": (with_torch_plain, ()),
    "torch flex": (with_flex, ()),
    "onnx Attention": (with_onnx_attention, ("onnx", "onnxruntime")),
    "onnxruntime MHA": (with_onnx_contrib, ("onnx", "onnxruntime")),
    "jax": (with_jax, ("jax",)),
    "NumPy": (with_numpy, ()),
}


def installed():
    """The peers whose modules are here, and those modules."""
    here, found = {}, set()
    for name, (make, modules) in PEERS.items():
        missing = [module for module in modules if find_spec(module) is None]
        if missing:
            print(f"{name} is left out: {' and '.join(missing)} not installed.")
        else:
            here[name] = make
            found.update(modules)
    return here, sorted(found)


def prepare(make, inputs, causal, threads):
    """``(run, output)``; CannotError where the peer fails in any way of its own."""
    try:
        run = make(*inputs, causal, threads)
        return run, run()
    except CannotError:
        raise
    except Exception as error:  # every library has its own
        raise CannotError(f"{type(error).__name__}: {textwrap.shorten(str(error), 160)}") from error


def measure(report, options, peers, dtype, shape, causal):
    """One row."""
    inputs = common.draw(shape, shape, shape, dtype=dtype)
    visible = common.lower(shape[2]) if causal else None
    runs, cells, error = {}, dict.fromkeys(peers, "-"), {}
    for name, make in peers.items():
        try:
            runs[name], output = prepare(make, inputs, causal, options.threads)
        except CannotError as reason:
            cells[name] = f"-{report.note(f'{name}: {reason}')}"
        else:
            error |= common.errors({name: output}, *inputs, visible)
    measured = common.interleave(runs, options, seconds=4, least=3)
    cells |= {name: common.ms(measured.median(name), error[name]) for name in runs}
    report.row(
        common.shape_name(shape), common.mask_name(causal), *cells.values(),
        dtype=dtype, shape=shape, causal=causal, seconds=measured.medians(), error=error,
    )  # fmt: skip


def main():
    """A table for each dtype."""
    options = common.read_options(__doc__, dtypes=["float32"])
    _start_with(options.threads)
    peers, modules = installed()
    report = common.Report("peers", options, packages=modules)
    for dtype in options.dtype:
        report.table(f"Forward beside other libraries, {dtype}", "B, H, T, D", "mask", *peers)
        for shape in QUICK if options.quick else SHAPES:
            for causal in (False, True):
                measure(report, options, peers, dtype, shape, causal)
    report.save()


def _start_with(threads):
    """Starts anew where need be: NumPy's BLAS and jax read their threads when they are loaded."""
    wanted = {"OMP_NUM_THREADS": str(threads), "NPROC": str(threads)}
    if not wanted.items() <= os.environ.items():
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | wanted)


if __name__ == "__main__":
    with torch.no_grad():
        main()
