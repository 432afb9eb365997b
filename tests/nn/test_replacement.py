"""regard's operator in models of torch: the same numbers, and a report of what was replaced."""

import copy
import functools
import io
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.functional import scaled_dot_product_attention as operator
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import regard
import regard.nn

X = torch.randn(2, 10, 32, generator=torch.Generator().manual_seed(0))
PADDING = torch.arange(10) >= torch.tensor([10, 7])[:, None]


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(32, 96)

    def forward(self, x):
        q, k, v = self.qkv(x).view(2, 10, 3, 4, 8).permute(2, 0, 3, 1, 4)
        y = scaled_dot_product_attention(q, k, v, is_causal=True)
        return y.transpose(1, 2).reshape(2, 10, 32)


class Method(nn.Module):
    def forward(self, x):
        return self.attend(x)

    @staticmethod
    def attend(x):
        return F.scaled_dot_product_attention(x, x, x)


class Inherited(Method):
    def forward(self, x):
        return x + super().forward(x)


class Nested(nn.Module):
    def forward(self, x):
        def attend(y):
            return F.scaled_dot_product_attention(y, y, y)

        return checkpoint(attend, x, use_reentrant=False)


class Decorated(nn.Module):
    @torch.autocast("cpu", enabled=False)
    def forward(self, x):
        return F.scaled_dot_product_attention(x, x, x)


class Function(nn.Module):
    def forward(self, x):
        return attend(x)


class Unflattened(nn.Module):
    def forward(self, x):
        heads = x.unflatten(-1, (4, 8)).transpose(1, 2)
        return torch.cond(x.sum() < 1e9, self.attend, torch.neg, (heads,))

    def attend(self, x):
        return F.scaled_dot_product_attention(x, x, x)


def attend(x):
    return operator(x, x, x)


class OwnAttention(nn.Module):
    def forward(self, x):
        return (x @ x.mT).softmax(-1) @ x


@pytest.fixture
def encoder():
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()


@pytest.fixture
def calls(monkeypatch):
    """How often regard computes."""
    from regard.nn import replacement

    made, computed = [], replacement.scaled_dot_product_attention

    def spy(*args, **kwargs):
        made.append(args[0].shape)
        return computed(*args, **kwargs)

    monkeypatch.setattr(replacement, "scaled_dot_product_attention", spy)
    return made


def test_a_block_computes_with_regard(encoder, calls):
    with torch.no_grad():
        expected = [encoder(X), encoder(X, src_key_padding_mask=PADDING)]
        with regard.patch_torch() as patched:
            found = [encoder(X), encoder(X, src_key_padding_mask=PADDING)]
    assert len(calls) == 4
    torch.testing.assert_close(found[0], expected[0], atol=2e-6, rtol=0)
    torch.testing.assert_close(found[1][~PADDING], expected[1][~PADDING], atol=2e-6, rtol=0)
    assert patched.replaced == {"layers.0.self_attn": 2, "layers.1.self_attn": 2}
    assert not patched.left
    assert "2 modules computed by regard" in str(patched)
    assert repr(patched) == "Replaced(2 modules, 0 left to torch)"
    encoder(X)
    assert len(calls) == 4
    assert torch.backends.mha.get_fastpath_enabled()


@pytest.mark.parametrize(
    "backward",
    [Tensor.backward, torch.autograd.backward, lambda y: torch.autograd.grad(y, y.made_of)],
)
def test_what_is_computed_again_in_the_backward_is_too(encoder, calls, backward):
    x = X.clone().requires_grad_()

    def model(x):
        for layer in encoder.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x

    encoder.forward = model
    with regard.patch_torch() as patched:
        y = encoder(x).sum()
        y.made_of = x
        backward(y)
    assert len(calls) == 4
    assert patched.replaced == {"layers.0.self_attn": 2, "layers.1.self_attn": 2}


def test_what_torch_still_computes_is_said(calls):
    layer = nn.MultiheadAttention(32, 4, batch_first=True).eval()
    with regard.patch_torch() as patched:
        output, weights = layer(X, X, X)
        assert not calls
        alone, none = layer(X, X, X, need_weights=False)
    assert none is None
    assert weights.shape == (2, 10, 10)
    torch.testing.assert_close(alone, output, atol=1e-6, rtol=1e-5)
    assert patched.replaced == {"": 1}
    assert "need_weights=False" in patched.left[""]
    assert "(the model)" in str(patched)
    assert "1 left to torch" in str(patched)


def test_a_function_under_another_name_is_found(calls):
    model = Attention()
    with regard.patch_torch() as patched:
        F.scaled_dot_product_attention(X, X, X)
        compiled = torch.compile(model, backend="eager")
        compiled(X)
    assert len(calls) == 2
    assert sum(patched.replaced.values()) == 2


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_other_attention_of_torch_is_reported_as_left():
    from torch.nn.attention.flex_attention import flex_attention

    class Flexible(nn.Module):
        def forward(self, x):
            return flex_attention(x, x, x)

    x = torch.randn(1, 2, 4, 8)
    with torch.no_grad(), regard.patch_torch() as patched:
        nn.Sequential(Flexible())(x)
    assert patched.left == {"0": "calls flex_attention, which stays torch's"}
    assert not patched.replaced


def layers_of(kind):
    return kind(32, 4, 64, batch_first=True, dropout=0.0)


CAUSAL = nn.Transformer.generate_square_subsequent_mask(10)
COMPILED = {
    "imported": (Attention, (X,), {}, 1),
    "nested": (Nested, (X[:, None],), {}, 1),
    "decorated": (Decorated, (X[:, None],), {}, 1),
    "unflattened": (Unflattened, (X,), {}, 1),
    "another name": (Function, (X[:, None],), {}, 1),
    "multi-head": (
        functools.partial(nn.MultiheadAttention, 32, 4, batch_first=True), (X, X, X),
        {"need_weights": False, "key_padding_mask": PADDING}, 1,
    ),
    "encoder": (
        lambda: nn.TransformerEncoder(
            layers_of(nn.TransformerEncoderLayer), 2, enable_nested_tensor=False
        ),
        (X,), {"mask": CAUSAL, "is_causal": True}, 2,
    ),
    "decoder": (
        lambda: nn.TransformerDecoder(layers_of(nn.TransformerDecoderLayer), 2),
        (X, X[:, :7]), {"memory_key_padding_mask": PADDING[:, :7]}, 4,
    ),
}  # fmt: skip


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("name", COMPILED)
def test_a_compiled_model_is_one_graph_with_regards_operator(name, trains):
    kind, args, options, count = COMPILED[name]
    model = kind().train(trains)
    seen = []

    def backend(graph, inputs):
        modules = [x for x in graph.modules() if isinstance(x, torch.fx.GraphModule)]
        seen.append([str(node.target) for module in modules for node in module.graph.nodes])
        return graph.forward

    def run(model):
        with torch.set_grad_enabled(trains):
            out = model(*args, **options)
        out = out[0] if isinstance(out, tuple) else out
        parameters = [*model.parameters()] if trains else []
        return [out, *(torch.autograd.grad(out.square().sum(), parameters) if parameters else ())]

    expected = run(model)
    torch.compiler.reset()
    with regard.nn.replace(model) as replaced:
        found = run(torch.compile(model, fullgraph=True, backend=backend))
        assert not sum(replaced.replaced.values())
        assert not replaced.left
    (graph,) = seen
    assert sum("regard" in target and "attention" in target for target in graph) == count
    assert not any("scaled_dot" in target or "multi_head" in target for target in graph)
    for x, y in zip(found, expected):
        torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(run(model)[0], expected[0], rtol=0, atol=0)


def test_a_compiled_model_says_what_is_wrong_with_its_padding():
    layer = nn.MultiheadAttention(32, 4, batch_first=True)
    regard.nn.replace(layer)
    compiled = torch.compile(layer, backend="eager")
    with pytest.raises((regard.ShapeError, AssertionError), match=r"key_padd(ing|ed)_mask"):
        compiled(X, X, X, key_padding_mask=PADDING.T, need_weights=False)  # as many numbers


def test_the_modules_of_a_model_are_replaced_and_put_back(encoder, calls):
    with torch.no_grad():
        expected = encoder(X)
        replaced = regard.nn.replace(encoder)
        assert replaced.replaced == {"layers.0.self_attn": 0, "layers.1.self_attn": 0}
        assert isinstance(encoder.layers[0].self_attn, nn.MultiheadAttention)
        torch.testing.assert_close(encoder(X), expected, atol=2e-6, rtol=0)
        torch.testing.assert_close(copy.deepcopy(encoder)(X), expected, atol=2e-6, rtol=0)
        assert len(calls) == 4
        assert replaced.replaced["layers.1.self_attn"] == 1
        encoder.load_state_dict(encoder.state_dict())
        assert regard.nn.replace(encoder).replaced == {
            "layers.0.self_attn": 0,
            "layers.1.self_attn": 0,
        }
        replaced.undo()
        assert type(encoder.layers[0].self_attn) is nn.MultiheadAttention
        assert torch.equal(encoder(X), expected)
    assert len(calls) == 4
    with regard.nn.replace(encoder):
        pass
    assert type(encoder.layers[0].self_attn) is nn.MultiheadAttention


def test_a_copy_computes_with_its_own_parameters():
    model = nn.Sequential(Attention(), OwnAttention())
    replaced = regard.nn.replace(model)
    assert replaced.left == {"1": "OwnAttention does not call torch's operator"}
    other = copy.deepcopy(model)
    with torch.no_grad():
        other[0].qkv.weight.mul_(2.0)
    assert not torch.allclose(other(X), model(X))


def unfilled():
    name = None

    class Unfilled(nn.Module):
        def other(self):
            return name

        def forward(self, x):
            return F.scaled_dot_product_attention(x, x, x)

    del name  # which leaves an empty cell
    return Unfilled


@pytest.mark.parametrize("kind", [Method, Inherited, Nested, Decorated, Function, unfilled()])
def test_the_operator_is_found_wherever_a_class_calls_it(kind, calls):
    model = nn.Sequential(Attention(), kind())
    with torch.no_grad():
        expected = model(X)
        replaced = regard.nn.replace(model)
        torch.testing.assert_close(model(X), expected, atol=2e-6, rtol=1e-5)
    assert replaced.replaced == {"0": 1, "1": 1}
    assert len(calls) == 2


def test_a_forward_of_one_module_alone_is_said_to_be_left(calls):
    model = nn.Sequential(*(Attention() for _ in range(3)), OwnAttention())
    model[1].forward = functools.partial(Attention.forward, model[1])
    model[3].forward = attend
    replaced = regard.nn.replace(model)
    model(X)
    assert replaced.replaced == {"0": 1, "2": 1}
    assert [*replaced.left] == ["1", "3"]
    assert "regard.patch_torch()" in replaced.left["1"]


def is_torchs(model):
    """Whether nothing is left of a replacement; attributes are those of the fixture."""
    modules = list(model.modules())
    assert not any("_regard_replaced" in vars(x) for x in modules)
    layers = [x for x in modules if isinstance(x, nn.TransformerEncoderLayer)]
    assert all(layer.activation_relu_or_gelu == 1 for layer in layers)
    return all(
        type(x).__module__.startswith("torch.") and "_kind" not in vars(type(x)) for x in modules
    )


def test_a_model_is_replaced_anew_after_undo(encoder, calls):
    for _ in range(2):
        with regard.nn.replace(encoder) as replaced:
            encoder(X)
            assert replaced.replaced == {"layers.0.self_attn": 1, "layers.1.self_attn": 1}
            assert encoder.layers[0].activation_relu_or_gelu == 0
        assert is_torchs(encoder)
    assert len(calls) == 4


def test_reports_are_undone_in_any_order(encoder):
    encoder.use_nested_tensor = True
    for order in (1, -1):
        reports = [regard.nn.replace(part) for part in (encoder.layers[0], encoder, encoder)]
        assert not encoder.use_nested_tensor
        for report in reports[::order]:
            report.undo()
            report.undo()
        assert encoder.use_nested_tensor
        assert is_torchs(encoder)


def test_what_is_saved_is_torchs_model(encoder, calls):
    expected = encoder(X)
    replaced, saved = regard.nn.replace(encoder), io.BytesIO()
    torch.save(encoder, saved)
    assert b"regard" not in saved.getvalue()
    saved.seek(0)
    loaded = torch.load(saved, weights_only=False)
    assert is_torchs(loaded)
    assert torch.equal(loaded(X), expected)
    assert not calls
    replaced.undo()
    torch.save(encoder, saved)


def test_a_copy_counts_its_own_calls_and_is_put_back_by_its_own_report(encoder, calls):
    replaced = regard.nn.replace(encoder)
    other = copy.deepcopy(encoder)
    other(X)
    assert len(calls) == 2
    assert replaced.replaced["layers.1.self_attn"] == 0
    with regard.nn.replace(other) as of_copy:
        other(X)
    assert of_copy.replaced["layers.1.self_attn"] == 1
    assert is_torchs(other)
    assert type(encoder.layers[0].self_attn) is not nn.MultiheadAttention


def test_a_copy_by_a_module_of_its_own_way_is_computed_by_regard(calls):
    graph = torch.fx.symbolic_trace(Attention())  # which copies and pickles itself
    regard.nn.replace(graph)
    copy.deepcopy(graph)(X)
    assert len(calls) == 1


def test_a_refused_model_is_left_as_it_was():
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).eval()
    layer.self_attn = OwnAttention()
    before = dict(vars(layer))
    with pytest.raises(regard.UnsupportedError, match="no module of TransformerEncoderLayer calls"):
        regard.nn.replace(layer)
    assert type(layer) is nn.TransformerEncoderLayer
    assert vars(layer) == before
    assert layer.activation_relu_or_gelu == 1


class Final(nn.MultiheadAttention):
    def __init_subclass__(cls, **options):
        raise TypeError("Final has no subclasses")


def test_a_class_that_refuses_to_be_derived_from_leaves_the_model_as_it_was(encoder):
    encoder.layers[1].self_attn.__class__ = Final
    with pytest.raises(TypeError, match="no subclasses"):
        regard.nn.replace(encoder)
    encoder.layers[1].self_attn.__class__ = nn.MultiheadAttention
    assert is_torchs(encoder)


@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
def test_torchscript_is_left_to_torch():
    class Heads(nn.Module):
        def forward(self, x):
            return F.scaled_dot_product_attention(x, x, x)

    x = torch.randn(1, 2, 7, 8)
    model = nn.Sequential(Heads(), torch.jit.trace(nn.Sequential(Heads()), x), nn.ReLU())
    expected = model(x)
    with regard.nn.replace(model) as replaced:
        torch.testing.assert_close(model(x), expected, atol=2e-6, rtol=0)
    assert replaced.replaced == {"0": 1}
    assert list(replaced.left) == ["1.0"]
    assert "TorchScript" in replaced.left["1.0"]
    with pytest.raises(regard.UnsupportedError, match="no module of TopLevelTracedModule calls"):
        regard.nn.replace(model[1])


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


def test_what_is_parametrized_while_it_is_replaced_is_put_back(encoder, calls):
    layer = encoder.layers[0].self_attn
    replaced = regard.nn.replace(encoder)
    parametrize.register_parametrization(layer, "in_proj_weight", Doubled())
    found = encoder(X)
    assert regard.nn.replace(encoder).replaced.keys() == replaced.replaced.keys()
    assert len(calls) == 2
    replaced.undo()
    torch.testing.assert_close(encoder(X), found, atol=2e-6, rtol=0)
    assert len(calls) == 2
    parametrize.remove_parametrizations(layer, "in_proj_weight")
    assert is_torchs(encoder)


def test_what_was_parametrized_before_it_is_replaced_is_taken_off_in_between(encoder, calls):
    layer = encoder.layers[0].self_attn
    parametrize.register_parametrization(layer, "in_proj_weight", Doubled())
    with regard.nn.replace(encoder):
        parametrize.register_parametrization(layer, "in_proj_bias", Doubled())
        other = copy.deepcopy(encoder)
        torch.testing.assert_close(other(X), encoder(X))
        assert len(calls) == 4
        parametrize.remove_parametrizations(layer, "in_proj_weight")
        expected = encoder(X)
    torch.testing.assert_close(encoder(X), expected, atol=2e-6, rtol=0)
    parametrize.remove_parametrizations(layer, "in_proj_bias")
    assert is_torchs(encoder)
    assert len(calls) == 6


def test_a_copy_of_what_is_parametrized_has_parameters_of_its_own():
    layer = nn.MultiheadAttention(32, 4, batch_first=True)
    regard.nn.replace(layer)
    parametrize.register_parametrization(layer, "in_proj_weight", Doubled())
    other = copy.deepcopy(layer)
    with torch.no_grad():
        other.parametrizations.in_proj_weight.original.zero_()
    assert layer.in_proj_weight.count_nonzero()
    assert not other.in_proj_weight.count_nonzero()


def test_a_class_put_over_a_replaced_one_computes_as_torch_after_undo(calls):
    layer = nn.MultiheadAttention(32, 4, batch_first=True)
    replaced = regard.nn.replace(layer)
    layer.__class__ = type("Sharded", (type(layer),), {})
    layer(X, X, X, need_weights=False)
    assert len(calls) == 1
    replaced.undo()
    layer(X, X, X, need_weights=False)
    assert len(calls) == 1


class Within(nn.Module):
    def forward(self, x):
        return scaled_dot_product_attention(x, x, x)


@pytest.mark.filterwarnings("ignore:.*PyTorch API of nested tensors is in prototype:UserWarning")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
@pytest.mark.parametrize("way", ["patched", "replaced"])
def test_nested_tensors_are_left_to_torch(layout, way):
    model = nn.ModuleDict({"inner": Within()})
    heads = X.unflatten(-1, (4, 8))
    texts = torch.nested.nested_tensor([heads[0], heads[1, :7]], layout=layout).transpose(1, 2)
    texts = texts if layout is torch.jagged else texts.contiguous()
    expected = model["inner"](texts)
    with regard.patch_torch() if way == "patched" else regard.nn.replace(model) as report:
        found = model["inner"](texts)
    name = "" if way == "patched" else "inner"
    assert f"query is a nested tensor, of layout {layout}" in report.left[name]
    assert not report.replaced[name]
    for one, right in zip(found.unbind(), expected.unbind()):
        assert torch.equal(one, right)


@pytest.mark.filterwarnings("ignore:.*PyTorch API of nested tensors is in prototype:UserWarning")
def test_layers_of_torch_with_nested_tensors_are_left_to_torch(encoder, calls):
    texts = torch.nested.nested_tensor([X[0], X[1, :7]])
    with torch.no_grad():
        expected = encoder(texts)
        with regard.nn.replace(encoder) as replaced:
            found = encoder(texts)
    assert "nested tensors" in replaced.left["layers.1.self_attn"]
    assert not calls
    for one, right in zip(found.unbind(), expected.unbind()):
        torch.testing.assert_close(one, right, atol=2e-6, rtol=0)


@pytest.mark.filterwarnings("ignore:.*PyTorch API of nested tensors is in prototype:UserWarning")
def test_layers_of_torch_with_nested_tensors_are_refused_in_a_block(encoder):
    texts = torch.nested.nested_tensor([X[0], X[1, :7]])
    layer = encoder.layers[0].self_attn
    for call in (
        lambda: encoder(texts),
        lambda: layer(query=texts, key=texts, value=texts, need_weights=False),
    ):
        with (
            pytest.raises(regard.UnsupportedError, match=r"Pad them, or take regard\.nn\.replace"),
            torch.no_grad(),
            regard.patch_torch(),
        ):
            call()
    with pytest.raises(AssertionError, match="another"), regard.patch_torch():
        raise AssertionError("another")


def test_gradients_are_those_of_torch():
    model = Attention()

    def gradient():
        model.zero_grad()
        model(X).square().sum().backward()
        return model.qkv.weight.grad.clone()

    expected = gradient()
    with regard.nn.replace(model):
        torch.testing.assert_close(gradient(), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("is_of_another", [False, True])
def test_only_functions_of_the_modules_own_file_are_followed(is_of_another):
    def attend(x):
        return F.scaled_dot_product_attention(x, x, x)

    if is_of_another:
        attend.__module__ = "another"
    own = {"__name__": __name__, "attend": attend}
    exec("def forward(self, x):\n    return attend(x)", own)
    model = type("Own", (nn.Module,), {"forward": own["forward"]})()
    if is_of_another:
        with pytest.raises(regard.UnsupportedError, match="no module of Own calls torch"):
            regard.nn.replace(model)
    else:
        assert len(regard.nn.replace(model).replaced) == 1


def test_a_model_without_torchs_operator_is_refused():
    with pytest.raises(regard.UnsupportedError, match="no module of Linear calls torch"):
        regard.nn.replace(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="str is no torch"):
        regard.nn.replace("model")


def test_calls_are_seen_while_another_thread_is_within_torchs_layer():
    is_within, is_done = threading.Event(), threading.Event()

    class Waiting(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func is F.multi_head_attention_forward:
                is_within.set()
                is_done.wait(20)
            return func(*args, **kwargs or {})

    def run():
        layer = nn.MultiheadAttention(32, 4, batch_first=True).eval()
        with Waiting(), regard.patch_torch():
            layer(X, X, X, need_weights=False)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert is_within.wait(20)
        with regard.patch_torch() as patched:
            F.scaled_dot_product_attention(X, X, X)
    finally:
        is_done.set()
        thread.join()
    assert (patched.replaced, patched.left) == ({"": 1}, {})


def test_threads_leave_torch_as_it_was():

    operator = F.scaled_dot_product_attention
    layers = [nn.MultiheadAttention(32, 4, batch_first=True).eval() for _ in range(2)]
    for layer in layers:
        regard.nn.replace(layer)

    def run(layer):
        for _ in range(30):
            layer(X, X, X, need_weights=False)

    threads = [threading.Thread(target=run, args=(layer,)) for layer in layers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert F.scaled_dot_product_attention is operator
    assert torch.backends.mha.get_fastpath_enabled()
