"""What records or watches a call sees an operator; graphs compute on what they are given."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import regard

pytestmark = [
    pytest.mark.usefixtures("by_both_backends"),
    # torch.jit.trace itself, and that a trace holds the checks of shapes.
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]
SIZES = 2, 4, 17, 8


def draw(n=3):
    return [torch.randn(SIZES) for _ in range(n)]


def attend(q, k, v, **options):
    return regard.attention(q, k, v, **options)


def drop_in(q, k, v):
    return regard.scaled_dot_product_attention(q, k, v, is_causal=True)


OPTIONS = {
    "none": {},
    "causal": {"causal": True},
    "window": {"window": (5, None), "softcap": 3.0, "key_lengths": torch.tensor([17, 9])},
    "mask": {"mask": torch.ones(17, 17, dtype=torch.bool).tril(), "bias": torch.ones(4, 1, 17)},
    "segments": {"segments": torch.arange(17) // 5, "causal": True, "sinks": torch.ones(4)},
    "dropout": {"dropout": 0.3, "seed": 4},
    "edits": {"edits": [regard.Edit(1, slice(3, 9), slice(5)), regard.Edit(0, -1, None, 2.0)]},
}
FUNCTIONS = {name: (lambda *x, o=o: attend(*x, **o)) for name, o in OPTIONS.items()}
FUNCTIONS["drop-in"] = drop_in


@pytest.fixture(params=FUNCTIONS)
def function(request):
    return FUNCTIONS[request.param]


@pytest.mark.parametrize("differentiates", [False, True])
def test_a_trace_computes_on_new_inputs(function, differentiates):
    given, fresh = draw(), draw()
    for x in given + fresh:
        x.requires_grad_(differentiates)
    traced = torch.jit.trace(function, given)  # and the check of torch's own, that runs it twice
    for _ in range(2):
        torch.testing.assert_close(traced(*fresh), function(*fresh), rtol=0, atol=0)
    with torch.no_grad():
        torch.testing.assert_close(traced(*given), function(*given))
        torch.testing.assert_close(torch.jit.trace(function, given)(*fresh), function(*fresh))
    if differentiates:
        pairs = zip(*(torch.autograd.grad(f(*fresh).sum(), fresh) for f in (traced, function)))
        for x, y in pairs:
            torch.testing.assert_close(x, y)


def test_a_trace_takes_lengths_and_starts_as_inputs():
    def padded(q, k, v, lengths, start):
        return attend(q, k, v, key_lengths=lengths, query_start=start, causal=True)

    traced = torch.jit.trace(padded, (*draw(), torch.tensor([17, 9]), torch.tensor([0, 2])))
    fresh = *draw(), torch.tensor([3, 17]), torch.tensor([5, 1])
    torch.testing.assert_close(traced(*fresh), padded(*fresh), rtol=0, atol=0)


def test_a_trace_of_the_drop_in_aligns_queries_that_became_fewer():
    traced = torch.jit.trace(drop_in, draw())
    q, k, v = draw()
    torch.testing.assert_close(traced(q[:, :, :9], k, v), drop_in(q[:, :, :9], k, v))


def test_a_trace_with_dropout_draws_anew_each_time():
    q, k, v = draw()
    traced = torch.jit.trace(lambda q: attend(q, k, v, dropout=0.5), q, check_trace=False)
    assert not torch.equal(traced(q), traced(q))


def test_make_fx_records_the_operator(function):
    record_and_compare(function, "real")


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
@pytest.mark.parametrize("name", ["none", "causal", "dropout", "drop-in"])
def test_make_fx_records_the_operator_on_fake_tensors(name, mode):
    record_and_compare(FUNCTIONS[name], mode)


def record_and_compare(function, mode):
    graph = make_fx(function, tracing_mode=mode)(*draw())
    names = [str(node.target) for node in graph.graph.nodes]
    assert any(name.startswith("regard.") for name in names)
    fresh = draw()
    torch.testing.assert_close(graph(*fresh), function(*fresh))


def test_an_exported_program_computes_on_new_inputs(function, by_both_backends):
    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return function(q, k, v)

    # Every function in both ways, each on one of the backends.
    number = list(FUNCTIONS.values()).index(function) + (by_both_backends == "torch")
    program = torch.export.export(Model(), tuple(draw()), strict=number % 2 == 0)
    fresh = draw()
    torch.testing.assert_close(program.module()(*fresh), function(*fresh))


def flops(function, *inputs):
    with FlopCounterMode(display=False) as counter:
        function(*inputs)
    return counter.get_total_flops()


def test_operations_are_counted(function):
    B, H, L, D = SIZES
    product = 2 * B * H * L * L * D
    q, k, v = draw()
    assert flops(function, q, k, v) == 2 * product
    for x in (q, k, v):
        x.requires_grad_()
    assert flops(lambda *x: function(*x).sum().backward(), q, k, v) == (2 + 5) * product
    # The second derivatives lead to the output, and so once more to the first ones.
    assert flops(lambda *x: penalty(function, *x), q, k, v) == (2 + 5 + 12 + 5) * product


def penalty(function, *inputs):
    first = torch.autograd.grad(function(*inputs).square().sum(), inputs, create_graph=True)
    torch.autograd.grad(sum(x.square().sum() for x in first), inputs)


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.names.append(str(operator))
        return operator(*args, **(kwargs or {}))


def is_attention(name):
    return name.startswith("regard") or "scaled_dot_product" in name


def test_dispatch_modes_see_an_operator_and_change_nothing(function):
    inputs = draw()
    with Seen() as seen:
        out = function(*inputs)
    assert any(map(is_attention, seen.names))
    torch.testing.assert_close(out, function(*inputs), rtol=0, atol=0)


class Called(torch.overrides.TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def test_function_modes_see_an_operator(function):
    inputs = draw()
    with Called() as called:
        function(*inputs)
    assert any("regard" in name or "scaled_dot_product" in name for name in called.names)


def test_the_profiler_names_the_operator(function):
    inputs = draw()
    with torch.autograd.profiler.profile() as profile:
        function(*inputs)
    assert any("regard::" in e.key or "scaled_dot" in e.key for e in profile.key_averages())


def test_weights_are_not_asked_for_where_a_graph_is_recorded():
    def entropy(q, k, v):
        return regard.attention(q, k, v, return_weights=True)[1].entropy()

    def row(q, k, v):
        return regard.AttentionWeights(q, k)[0, 0, 3]

    for ask in (entropy, row):
        with pytest.raises(regard.UnsupportedError, match=r"AttentionWeights.* outside"):
            torch.jit.trace(ask, draw(), check_trace=False)
        with pytest.raises(regard.UnsupportedError, match="cannot become part of a graph"):
            torch.vmap(ask)(*(torch.stack([x, x]) for x in draw()))
    with pytest.raises(regard.UnsupportedError, match="cannot become part of a graph"):
        make_fx(row)(*draw())
    given = draw()
    with Seen():
        watched = entropy(*given)
    torch.testing.assert_close(watched, entropy(*given), rtol=0, atol=0)


def test_the_output_beside_weights_is_recorded():
    def attend_both(q, k, v):
        return regard.attention(q, k, v, return_weights=True)[0]

    fresh = draw()
    traced = torch.jit.trace(attend_both, draw())
    torch.testing.assert_close(traced(*fresh), attend_both(*fresh), rtol=0, atol=0)


def test_the_definition_in_numpy_is_not_recorded():
    for record in (
        lambda f: torch.jit.trace(f, draw()),
        lambda f: make_fx(f)(*draw()),
        lambda f: torch.vmap(f)(*(torch.stack([x, x]) for x in draw())),
    ):
        with pytest.raises(regard.UnsupportedError, match="no graph or transform of torch"):
            record(lambda *x: regard.attention(*x, backend="reference"))


def test_an_empty_call_is_traced():
    q, k, v = (x[:, :, :0] for x in draw())
    for given in ((q, k, v), (draw()[0], k, v)):
        traced = torch.jit.trace(attend, given)
        assert (traced(*given) == 0).all()
        assert make_fx(FUNCTIONS["none"])(*given)(*given).shape == given[0].shape
