"""What is asked of weights where torch compiles: the numbers of the plain call, in one graph."""

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounter

import regard
from regard._weights import questions, traced

# Of torch's own, when it loads its compiler.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")

B, HQ, HKV, LQ, LK, D = 2, 4, 2, 37, 45, 6
RANDOM = torch.Generator().manual_seed(5)


def draw(*shape):
    return torch.randn(shape, generator=RANDOM)


QUERY, KEY, BIAS, SINKS = draw(B, HQ, LQ, D), draw(B, HKV, LK, D), draw(1, 1, LQ, LK), draw(HQ)
X, Y = draw(B, HQ, LK, 3), draw(LQ, 2)
ROWS, COLUMNS = torch.tensor([0, 5, -1, 36, 3, 7]), torch.tensor([0, 44, 1, 9, 3, -3])
QUERY_IDS, KEY_IDS = torch.arange(LQ) % 4 - 1, torch.arange(LK) // 9

WITH_GRADIENT = {
    "entropy": lambda w: w.entropy(),
    "max_score": lambda w: w.max_score,
    "received": lambda w: w.received("seen", queries=slice(4, 30, 3)),
    # torch.compile knows no operator of an object and a tensor, and calls methods.
    "product": lambda w: w.__matmul__(X),
    "transposed": lambda w: w.T.__matmul__(Y),
    "mass": lambda w: w.mass(torch.arange(LK) % 3 == 0),
    "blocks": lambda w: w.blocks(QUERY_IDS.tolist(), KEY_IDS.tolist(), "mean"),
    "blocks of tensors": lambda w: w.blocks(QUERY_IDS, KEY_IDS, "mass", counts=(3, 6)),
    "diagonals": lambda w: w.diagonals((-3, 0, 4, 30)),
    "at": lambda w: w.at(ROWS, COLUMNS),
    "rows": lambda w: w[1, 2, 30:3:-4, 5:40],
    "row": lambda w: w[..., w.shape[-2] - 1, :],
    "of a part": lambda w: w.part(slice(3, 20, 2)).head(-1).distance(),
}
WITHOUT = {
    "largest": lambda w: (w.max(-2), w.argmax(-1)),
    "pool": lambda w: w.pool((8, 8), ("max", "mass"), rows=slice(3, 9)),
    "summary": lambda w: w.summary(topk=2, only=("entropy", "topk", "strongest")),
    "of some keys": lambda w: w.part(columns=slice(4, 9)).received("max"),
}
ALL = WITH_GRADIENT | WITHOUT
OF_TORCH = ("received", "diagonals", "transposed", "mass")  # asked of that backend
OPTIONS = {
    "causal": {"causal": True},
    "lengths": {"key_lengths": torch.tensor([LK, 20]), "window": (9, 0)},
    "edits": {"edits": [regard.Edit(1, slice(3, 9), slice(5))], "softcap": 2.0, "scale": 0.7,
              "query_start": 4, "segments": (torch.arange(LQ) // 20, torch.arange(LK) // 20)},
}  # fmt: skip


def flat(x):
    """The tensors of an answer."""
    return [tensor for part in x for tensor in flat(part)] if isinstance(x, tuple) else [x]


def leaves():
    return [x.clone().requires_grad_() for x in (QUERY, KEY, BIAS, SINKS)]


def compiled(function, **options):
    torch._dynamo.reset()  # it compiles no function more than a few times
    return torch.compile(function, **{"fullgraph": True, "backend": "eager"} | options)


def assert_same(plain, other):
    assert type(plain) is type(other)
    for x, y in zip(flat(plain), flat(other), strict=True):
        if x is None:
            assert y is None
            continue
        assert x.requires_grad == y.requires_grad
        torch.testing.assert_close(y, x, rtol=0, atol=0, equal_nan=True)


def gradients(answers, inputs):
    found = [x.nan_to_num(neginf=0.0) for answer in answers for x in flat(answer)]
    return torch.autograd.grad(sum(x.sin().sum() for x in found), inputs)


@pytest.mark.parametrize(
    ("backend", "options", "names", "how"),
    [
        ("kernel", "causal", [name for name in ALL if name not in OF_TORCH], {}),
        ("kernel", "edits", ["max_score", "blocks"], {"dynamic": True}),
        ("torch", "lengths", ["received", "diagonals", "at", "rows"], {}),
        ("torch", "causal", ["transposed", "mass"], {"backend": "aot_eager"}),
        ("kernel", "lengths", ["at"], {"backend": "inductor"}),
    ],
)
def test_it_compiles_into_one_graph(backend, options, names, how):
    def ask(query, key, bias, sinks):
        weights = regard.AttentionWeights(
            query, key, bias=bias, sinks=sinks, backend=backend, **OPTIONS[options]
        )
        return [ALL[name](weights) for name in names]

    inputs = leaves()
    plain, other = ask(*inputs), compiled(ask, **how)(*inputs)
    for x, y in zip(plain, other):
        assert_same(x, y)
    differentiable = [n for n, name in enumerate(names) if name in WITH_GRADIENT]
    pair = [gradients([flat(x[n])[-1] for n in differentiable], inputs) for x in (plain, other)]
    for x, y in zip(*pair):  # sums of several gradients, in any order
        torch.testing.assert_close(y, x, rtol=1e-6, atol=1e-6 * x.abs().max().item())


def test_the_gradient_has_the_bits_of_the_plain_one():
    def ask(query, x):
        return regard.AttentionWeights(query, query, causal=True).__matmul__(x)

    query, x = draw(3, 70, 8).requires_grad_(), draw(70, 2).requires_grad_()
    pair = [ask(query, x), compiled(ask)(query, x)]
    for one, other in zip(*(torch.autograd.grad(y.square().sum(), (query, x)) for y in pair)):
        assert torch.equal(one, other)
    answer = compiled(ask)(query, x).sum()
    (first,) = torch.autograd.grad(answer, query, create_graph=True)
    with pytest.raises(regard.UnsupportedError, match="a first derivative and no second"):
        first.sum().backward()


def test_one_graph_serves_every_length():
    def ask(x):
        weights = regard.AttentionWeights(x, x, causal=True, window=(20, None))
        rows = weights[-1, 2 : x.shape[1] - 1, ::-2]
        return rows, weights.diagonals(), torch.zeros(weights.part(slice(3, None)).T.shape)

    counter = CompileCounter()
    graph = compiled(ask, backend=counter, dynamic=True)
    for length in (9, 12, 70):
        x = draw(3, length, 8)
        assert_same(ask(x), graph(x))
    assert counter.frame_count == 1


def test_the_weights_of_an_output_share_its_statistics_in_the_graph():
    def ask(query, key):
        output, weights = regard.attention(query, key, key, causal=True, return_weights=True)
        return output, weights.entropy(), weights.strongest(3)

    query, key = leaves()[:2]
    graphs = []
    graph = compiled(ask, backend=lambda module, _: graphs.append(module) or module)
    assert_same(ask(query, key), graph(query, key))
    assert "row_statistics" not in graphs[0].code


@pytest.mark.parametrize("shape", [(9, 4), (2, 3, 0, 4)])
def test_any_layout_compiles(shape):
    def ask(x):
        weights = regard.AttentionWeights(x, x)
        found = weights.lse, weights.max_score, weights.diagonals(), weights.matrix()[:2]
        return (*found, weights[..., 1:, ::-2], weights.at([[]], []), weights.sum(keepdims=True))

    x = draw(*shape)
    assert_same(ask(x), compiled(ask)(x))


def test_what_no_graph_can_hold_ends_it_and_has_the_plain_numbers():
    x = draw(3, 9, 4)

    def ask(x):
        weights = regard.AttentionWeights(x, x, causal=True)
        part = weights.part(slice(2, 6)).head(1)
        whole = np.asarray(weights)
        others = regard.AttentionWeights(2 * x, x, causal=True)
        found = whole, part.entropy(), regard.divergence(weights, others), others @ x[0]
        return found, repr(part), part.shape

    plain, other = ask(x), compiled(ask, fullgraph=False)(x)
    assert plain[1:] == other[1:]
    for one, another in zip(plain[0], other[0], strict=True):
        np.testing.assert_array_equal(np.asarray(another), np.asarray(one))


def test_weights_from_outside_are_asked_in_a_graph():
    weights = regard.AttentionWeights(QUERY, KEY, causal=True)
    rows = weights.part(slice(3, 30, 2))

    def ask(x):
        found = weights[0, 1], rows.received(), weights.strongest(3)
        return *found, weights.__matmul__(x)

    x = X.clone().requires_grad_()
    plain, other = ask(x), compiled(ask)(x)
    assert_same(plain, other)
    first, second = (torch.autograd.grad(y[-1].square().sum(), x)[0] for y in (plain, other))
    assert torch.equal(first, second)


def test_an_exported_program_asks_weights_of_new_inputs():
    class Model(torch.nn.Module):
        def forward(self, x):
            weights = regard.AttentionWeights(x, x, causal=True)
            return weights.entropy(), weights[0, 1:3], weights.strongest(2).query

    program = torch.export.export(Model(), (draw(3, 9, 4),), strict=False)
    x = draw(3, 9, 4)
    torch.testing.assert_close(program.module()(x), Model()(x))


def test_every_question_has_a_shape_in_a_graph():
    assert questions.QUESTIONS == traced.SHAPES.keys()
    assert questions.PARTS == traced.PARTS.keys()


def test_what_a_graph_lacks_is_named():
    x, ids = draw(3, 9, 4), torch.arange(9) // 4

    def blocks(x):
        return regard.AttentionWeights(x, x).blocks(ids, ids)

    def diagonals(x):
        return regard.AttentionWeights(x, x, query_start=2).diagonals()

    for ask, way_out in ((blocks, r"counts=\(rows, columns\)"), (diagonals, r"diagonals\(edges\)")):
        with pytest.raises(torch._dynamo.exc.Unsupported, match=way_out):
            compiled(ask)(x)
    with pytest.raises(Exception, match="there is no head 7"):
        compiled(lambda x: regard.AttentionWeights(x, x).head(7).entropy())(x)
    with pytest.raises(IndexError, match=r"keys has 9; there are 9, 0 to 8"):
        compiled(lambda x, j: regard.AttentionWeights(x, x).at(0, j))(x, torch.tensor([9]))
