"""What torch.onnx.export writes computes what regard computes, in ONNX Runtime."""

import functools
import io
import sys

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

import regard
import regard.nn

# What torch's exporters themselves use and print, and that a trace holds the checks of shapes.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
    pytest.mark.filterwarnings("ignore:.*(dynamic_axes|opset|ONNX|onnx|axis name).*:UserWarning"),
]


class Model(torch.nn.Module):
    def __init__(self, function, options):
        super().__init__()
        self.function, self.options = function, options

    def forward(self, *inputs):
        return self.function(*inputs, **self.options)


def export(model, inputs, *, dynamo=True, opset=None, **arguments):
    """The model of the exporter that captures with torch.export, or of the one that traces."""
    opset = opset or (23 if dynamo else 18)  # what the second one knows ends at 20
    if dynamo:
        program = torch.onnx.export(
            model, inputs, dynamo=True, opset_version=opset, verbose=False, **arguments
        )
        return program.model_proto
    file = io.BytesIO()
    torch.onnx.export(model, inputs, file, dynamo=False, opset_version=opset, **arguments)
    return onnx.load_from_string(file.getvalue())


def run_all(model, *inputs):
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    names = [x.name for x in session.get_inputs()]
    found = session.run(None, dict(zip(names, (x.numpy() for x in inputs), strict=True)))
    return [torch.from_numpy(np.asarray(out)) for out in found]


def run(model, *inputs):
    (out,) = run_all(model, *inputs)
    return out


def draw(*shape):
    return torch.randn(*shape)


def triple(B=2, Hq=4, Hkv=4, Lq=7, Lk=7, D=8):
    return draw(B, Hq, Lq, D), draw(B, Hkv, Lk, D), draw(B, Hkv, Lk, D)


ids = torch.arange(7) // 3
EDITS = [
    regard.Edit(1, slice(2, None), slice(0, 3), 0.0), regard.Edit(None, -1, 4, 3.0),
    regard.Edit(queries=0),
]  # fmt: skip
OPTIONS = {
    "none": ({}, {}),
    "causal": ({}, {"causal": True}),
    "scale": ({}, {"scale": 0.3, "causal": True}),
    "scale below zero": ({}, {"scale": -0.3, "causal": True}),
    "grouped": ({"Hkv": 2}, {"causal": True}),
    "the last queries": ({"Lq": 3}, {"causal": True}),
    "mask": ({}, {"mask": torch.ones(7, 7, dtype=torch.bool).tril(1)}),
    "mask that hides all from one": ({}, {"mask": torch.arange(7)[:, None] > torch.arange(7)}),
    "bias": ({}, {"bias": torch.linspace(-2, 2, 49).reshape(7, 7), "causal": True}),
    "bias of heads": ({}, {"bias": torch.linspace(-2, 2, 4).reshape(4, 1, 1)}),
    "window": ({"Hkv": 1}, {"window": (2, 1)}),
    "lengths": ({}, {"key_lengths": torch.tensor([7, 4]), "causal": True}),
    "segments": ({}, {"segments": ids, "causal": True}),
    "intervals": ({}, {"intervals": (torch.arange(7) - 2, torch.arange(7) // 3 * 3)}),
    "start": ({"Lq": 3}, {"causal": True, "query_start": torch.tensor([1, 3])}),
    "softcap": ({"Hkv": 2}, {"softcap": 2.0, "causal": True}),
    "sinks": ({}, {"sinks": torch.tensor([0.5, 3.0, -1.0, 0.0]), "causal": True}),
    "edits": ({}, {"edits": EDITS, "causal": True}),
    "edits and bias": ({}, {"edits": EDITS, "bias": torch.linspace(-2, 2, 7), "softcap": 3.0}),
}


by_each_exporter = pytest.mark.parametrize(
    "dynamo",
    [pytest.param(d, marks=pytest.mark.xdist_group(f"onnx {d}")) for d in (True, False)],
)


def attend_by_every_option(*inputs):
    """An output for each of the options, which have a query, key and value of their own."""
    calls = zip(inputs[::3], inputs[1::3], inputs[2::3], OPTIONS.values(), strict=True)
    return tuple(regard.attention(q, k, v, **options) for q, k, v, (_, options) in calls)


@functools.cache
def computed(dynamo):
    """``(found, right)`` of each option: all of them are one model, and exported once."""
    model = Model(attend_by_every_option, {}).eval()
    given, fresh = ([x for sizes, _ in OPTIONS.values() for x in triple(**sizes)] for _ in "12")
    written = export(model, tuple(given), dynamo=dynamo)
    assert len(written.graph.input) == 3 * len(OPTIONS)
    pairs = zip(run_all(written, *fresh), model(*fresh), strict=True)
    return dict(zip(OPTIONS, pairs, strict=True))


@pytest.mark.parametrize("name", OPTIONS)
@by_each_exporter
def test_an_exported_model_computes_the_same(name, dynamo):
    found, right = computed(dynamo)[name]
    torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dynamo", [True, False])
def test_every_tensor_of_a_call_is_an_input_of_the_model(dynamo):
    def attend(q, k, v, bias, lengths):
        return regard.attention(q, k, v, bias=bias, key_lengths=lengths, causal=True)

    inputs = *triple(), draw(2, 4, 7, 7), torch.tensor([7, 4])
    model = Model(attend, {}).eval()
    written = export(model, inputs, dynamo=dynamo)
    fresh = *triple(), draw(2, 4, 7, 7), torch.tensor([3, 6])
    torch.testing.assert_close(run(written, *fresh), model(*fresh), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dynamo", [True, False])
@pytest.mark.parametrize("Lq", [3, 7])
def test_the_drop_in_aligns_as_torch_does(dynamo, is_causal, Lq):
    model = Model(regard.scaled_dot_product_attention, {"is_causal": is_causal}).eval()
    written = export(model, triple(Lq=Lq), dynamo=dynamo)
    fresh = triple(Lq=Lq)
    torch.testing.assert_close(run(written, *fresh), model(*fresh), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("function", [regard.attention, regard.scaled_dot_product_attention])
def test_lengths_may_change_after_the_export(function):
    causal = {"causal": True} if function is regard.attention else {"is_causal": True}
    model = Model(function, causal).eval()
    queries, keys = torch.export.Dim("queries", min=2), torch.export.Dim("keys", min=2)
    shapes = {2: queries}, {2: keys}, {2: keys}
    by_capture = export(model, triple(Lq=5), dynamic_shapes={"inputs": shapes})
    axes = {name: {2: name} for name in "qkv"}
    by_trace = export(model, triple(), dynamo=False, input_names=list("qkv"), dynamic_axes=axes)
    for sizes in ({"Lq": 3, "Lk": 9}, {"Lq": 11, "Lk": 11}, {"Lq": 6, "Lk": 4}):
        fresh = triple(**sizes)
        for written in (by_capture, by_trace):
            torch.testing.assert_close(run(written, *fresh), model(*fresh), rtol=1e-5, atol=1e-5)


def test_what_attention_of_onnx_means_is_one_node():
    for options in ({"causal": True}, {"mask": torch.ones(7, 7, dtype=torch.bool).tril(1)}):
        written = export(Model(regard.attention, options).eval(), triple(Hkv=2))
        assert "Attention" in [node.op_type for node in written.graph.node]
    older = export(Model(regard.attention, {"causal": True}).eval(), triple(Hkv=2), opset=18)
    assert "Softmax" in [node.op_type for node in older.graph.node]


@pytest.mark.parametrize("dynamo", [True, False])
def test_dropout_is_not_exported(dynamo):
    model = Model(regard.attention, {"dropout": 0.1, "seed": 1}).eval()
    with pytest.raises(Exception, match="Export the model in eval mode, without dropout") as caught:
        export(model, triple(), dynamo=dynamo)
    causes = [caught.value, caught.value.__cause__]
    assert any(isinstance(cause, regard.UnsupportedError) for cause in causes)


def test_a_named_backend_that_onnx_cannot_hold_says_so():
    model = Model(regard.attention, {"backend": "kernel"}).eval()
    with pytest.raises(regard.UnsupportedError, match="kernel: ONNX has no such operator"):
        export(model, triple(), dynamo=False)


@pytest.mark.parametrize("dynamo", [True, False])
def test_a_replaced_model_is_exported_in_a_fresh_process(dynamo, monkeypatch):
    monkeypatch.delitem(sys.modules, "regard._backends.onnx", raising=False)
    monkeypatch.delattr(regard._backends, "onnx", raising=False)
    model = torch.nn.TransformerEncoder(
        torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2
    ).eval()
    regard.nn.replace(model)
    with torch.no_grad():
        written, fresh = export(model, (draw(2, 5, 32),), dynamo=dynamo), draw(2, 5, 32)
        torch.testing.assert_close(run(written, fresh), model(fresh), rtol=1e-5, atol=1e-5)
