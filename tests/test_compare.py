"""Two matrices of weights against the formulas on whole distributions in float64."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings

import regard
from definition import define
from recordings import numbers
from regard import AttentionWeights
from strategies import calls
from test_effects import PLAIN, TWO, check
from ways import NAMED, by_ways

B, Hq, Hkv, Lq, Lk, D = 2, 4, 2, 23, 26, 8
KINDS = ["kl", "reverse_kl", "jensen_shannon", "total_variation"]
MASK = np.random.default_rng(5).random((Hq, Lq, Lk)) < 0.6
OPTIONS = {
    "plain": ({}, {}),
    "causal": ({"causal": True}, {"causal": True}),
    "less seen": ({"causal": True}, {"causal": True, "window": (4, 0)}),
    "mask": ({"mask": MASK}, {"mask": MASK}),
    "sinks": ({"sinks": numbers(Hq, dtype=np.float64)}, {"sinks": numbers(Hq, seed=7) * 1.0}),
    "one sink": ({"sinks": numbers(Hq, dtype=np.float64), "causal": True}, {"causal": True}),
    "rows that see nothing": (
        {"causal": True, "query_start": -3},
        {"causal": True, "query_start": -5},
    ),
    "softcap and scale": ({"softcap": 1.0}, {"scale": 2.0}),
}


def operands(dtype=np.float64):
    q, k = 3 * numbers(B, Hq, Lq, D), numbers(B, Hkv, Lk, D, seed=1)
    return q.astype(dtype), k.astype(dtype), (q + numbers(*q.shape, seed=2)).astype(dtype)


def distributions(q, k, **options):
    """``(..., Lk + 1)``: over the keys, and no key."""
    if "sinks" in options:
        options["sinks"] = options["sinks"].astype(float)
    w, lse = define(q, k, **options)
    rest = np.where(np.isinf(lse), 1, 1 - w.sum(-1) if "sinks" in options else 0)
    return np.concatenate([w, np.maximum(rest, 0)[..., None]], -1)


def right(kind, a, b):
    with np.errstate(all="ignore"):
        if kind == "total_variation":
            return abs(a - b).sum(-1) / 2
        if kind == "jensen_shannon":
            return (right("kl", a, (a + b) / 2) + right("kl", b, (a + b) / 2)) / 2
        if kind == "reverse_kl":
            return right("kl", b, a)
        return np.where(a > 0, a * np.log(a / b), 0).sum(-1)


def pair(way, name="plain", dtype=np.float64):
    q, k, other = (way.convert(x) for x in operands(dtype))

    def convert(name, x):
        return way.convert(x.astype(dtype) if name == "sinks" else x)

    options = [{n: convert(n, x) for n, x in one.items()} for one in OPTIONS[name]]
    return [
        AttentionWeights(x, k, backend=way.backend, **own) for x, own in zip((q, other), options)
    ]


def exact(name="plain", dtype=np.float64):
    q, k, other = operands(dtype)
    first, second = OPTIONS[name]
    return distributions(q, k, **first), distributions(other, k, **second)


@by_ways(*TWO)
@pytest.mark.parametrize("name", OPTIONS)
def test_divergences_are_those_of_the_formulas(name, way):
    a, b = exact(name)
    comparison = regard.compare(*pair(way, name))
    found = comparison.divergences(3)
    for kind in KINDS:
        wanted = right(kind, a, b)
        np.testing.assert_allclose(getattr(found, kind), wanted, atol=1e-12, rtol=1e-11)
        if way == PLAIN:
            np.testing.assert_array_equal(comparison.divergence(kind), getattr(found, kind))
    assert (np.isinf(right("kl", a, b)).any()) == (
        name in ("less seen", "one sink", "rows that see nothing")
    )
    best = [np.argsort(-x[..., :-1], -1, kind="stable")[..., :3] for x in (a, b)]
    kept = [np.take_along_axis(x, at, -1) > 0 for x, at in zip((a, b), best)]
    of_a, of_b = (np.where(seen, at, -1 - n) for n, (seen, at) in enumerate(zip(kept, best)))
    common = (of_a[..., :, None] == of_b[..., None, :]).sum((-1, -2))
    most = np.maximum(kept[0].sum(-1), kept[1].sum(-1))
    wanted = np.where(most == 0, 1, common / np.maximum(most, 1))
    np.testing.assert_allclose(found.overlap, wanted, rtol=1e-15)
    np.testing.assert_array_equal(comparison.head(1).overlap(3), np.asarray(found.overlap)[:, 1])


@by_ways(*NAMED)
def test_float32_is_within_a_millionth_and_never_negative(way):
    a, b = exact(dtype=np.float32)
    weights = pair(way, dtype=np.float32)
    comparison = regard.compare(*weights)
    for kind in KINDS:
        found = np.asarray(comparison.divergence(kind))
        assert found.dtype == np.float32
        wanted = right(kind, a, b)
        assert (abs(found - wanted) <= 1e-6 * np.maximum(1, wanted)).all()
        assert not np.asarray(regard.divergence(weights[0], weights[0], kind)).any()
    close = AttentionWeights(weights[0]._call.query * (1 + 1e-5), weights[0]._call.key)
    assert (np.asarray(regard.divergence(weights[0], close)) >= 0).all()


@by_ways(*NAMED)
def test_a_weight_that_float32_cannot_hold_still_diverges(way):
    q, k = (way.convert(x) for x in (np.ones((1, 1), np.float32), np.array([[0.0], [200]])))
    k = way.convert(np.array([[0.0], [200.0]], np.float32))
    even = AttentionWeights(q, 0 * k, scale=1.0, backend=way.backend)
    sharp = AttentionWeights(q, k, scale=1.0, backend=way.backend)
    np.testing.assert_allclose(regard.divergence(even, sharp), [100 - np.log(2)], rtol=1e-6)
    np.testing.assert_allclose(regard.divergence(sharp, even), [np.log(2)], rtol=1e-6)


@settings(max_examples=25)
@given(calls(min_length=1))
def test_whatever_the_options_divergences_are_those_of_the_formulas(call):
    (q, k, _), options = call
    other = q + np.random.default_rng(1).standard_normal(q.shape)
    a, b = distributions(q, k, **options), distributions(other, k, **options)
    found = regard.compare(AttentionWeights(q, k, **options), AttentionWeights(other, k, **options))
    for kind, x in found.divergences()._asdict().items():
        if kind != "overlap":
            np.testing.assert_allclose(x, right(kind, a, b), atol=1e-9, rtol=1e-9)


@by_ways(*NAMED)
@pytest.mark.parametrize("sinks", [None, np.zeros(Hq)])
def test_rows_of_nan_diverge_by_nan(sinks, way):
    q, k, other = operands()
    right = [AttentionWeights(x, k, causal=True, sinks=sinks) for x in (q, other)]
    right = [np.asarray(x) for x in regard.compare(*right).divergences()[:4]]
    k = k.copy()
    k[0, 1, 11] = np.nan  # which queries 8 to 22 see, in heads 2 and 3
    given = [way.convert(x) for x in (q, k, other)]
    options = {"causal": True, "backend": way.backend}
    options |= {} if sinks is None else {"sinks": way.convert(sinks)}
    pair = [AttentionWeights(x, given[1], **options) for x in (given[0], given[2])]
    for found, whole in zip(regard.compare(*pair).divergences()[:4], right):
        whole[0, 2:, 8:] = np.nan
        np.testing.assert_allclose(np.asarray(found), whole, atol=1e-6)


@by_ways(*NAMED)
def test_the_difference_answers_every_question(way):
    weights = pair(way, "less seen")
    whole = np.asarray(weights[0]) - np.asarray(weights[1])
    comparison = regard.compare(*weights)
    check(comparison.matrix(1, 3), whole[1, 3])
    if way != PLAIN:
        return
    check(comparison, whole)
    check(comparison.head(1), whole[:, 1])
    check(comparison.part(slice(2, 20, 3), slice(1, 25, 2)), whole[:, :, 2:20:3, 1:25:2])


@pytest.mark.parametrize("backend", ["kernel", "torch"])
def test_some_of_the_divergences_have_the_numbers_of_all(backend):
    q, k, other = operands()
    of_q, of_other = (AttentionWeights(torch.from_numpy(x), torch.from_numpy(k), backend=backend)
                      for x in (q, other))  # fmt: skip
    comparison = regard.compare(of_q, of_other)
    every = comparison.divergences(3)._asdict()
    for names in (["overlap", "kl"], ("total_variation",), ["kl", "kl"], []):
        found = comparison.divergences(3, kinds=names)
        assert list(found) == list(dict.fromkeys(names))
        for name, x in found.items():
            torch.testing.assert_close(x, every[name], rtol=0, atol=0)
    with pytest.raises(ValueError, match=r"divergences: kind is 'js'; 'kl', .*'overlap' are known"):
        comparison.divergences(kinds=["js"])


def test_divergences_are_computed_in_blocks_of_rows(monkeypatch):
    whole = regard.compare(*pair(PLAIN, "less seen")).divergences()
    monkeypatch.setattr(regard.PairMatrix, "_lowest", 5)
    monkeypatch.setattr(regard.PairMatrix, "_tallest", 5)
    comparison = regard.compare(*pair(PLAIN, "less seen"))
    for found, wanted in zip(comparison.divergences(), whole):
        np.testing.assert_allclose(found, wanted, rtol=1e-12)
    kl = comparison.part(slice(2, 21, 3)).divergence("kl")
    np.testing.assert_allclose(kl, whole.kl[:, :, 2:21:3], rtol=1e-12)


def test_parts_heads_and_means_are_compared():
    q, k, other = operands()
    one, two = AttentionWeights(q, k), AttentionWeights(other, k)
    a, b = exact()
    whole = right("kl", a, b)
    comparison = regard.compare(one, two)
    for found, wanted in [
        (comparison.head(2), whole[:, 2]),
        (comparison.part(slice(1, 20, 4)), whole[:, :, 1:20:4]),
        (comparison.matrix(1, 3), whole[1, 3]),
        (regard.compare(one.head(2), two.head(2)), whole[:, 2]),
        (regard.compare(one.part(slice(4, 9)), two.part(slice(4, 9))), whole[:, :, 4:9]),
        (regard.compare(one.mix(), two.mix()), right("kl", a.mean(1), b.mean(1))),
        (regard.compare(one.mix([1]), two.head(1)), whole[:, 1]),
        (regard.compare(regard.mix([one, two]), two), right("kl", (a + b) / 2, b)),
    ]:
        np.testing.assert_allclose(found.divergence("kl"), wanted, atol=1e-12)
    group = AttentionWeights(q[:, :2], k[:, :1])  # other heads, by their means
    kl = regard.divergence(one.mix(), group.mix())
    np.testing.assert_allclose(kl, right("kl", a.mean(1), a[:, :2].mean(1)), atol=1e-12)
    sinks = numbers(Hq, dtype=np.float64)
    mixed = AttentionWeights(q, k, sinks=sinks).mix()
    wanted = right("kl", distributions(q, k, sinks=sinks).mean(1), b.mean(1))
    np.testing.assert_allclose(regard.divergence(mixed, two.mix()), wanted)


def test_rollouts_are_compared():
    q, k = numbers(2, 5, 4, dtype=np.float64), numbers(2, 5, 4, seed=1, dtype=np.float64)
    one, two = (
        regard.Recording(list("abcde"), [regard.Layer(x, k, causal=True)] * 1) for x in (q, -q)
    )
    a, b = (regard.rollout(x) for x in (one, two))
    wanted = right("kl", np.asarray(a), np.asarray(b))
    np.testing.assert_allclose(regard.divergence(a, b), wanted, atol=1e-14)


def test_faults_of_comparisons_are_named():
    q, k, other = operands()
    one, two = AttentionWeights(q, k), AttentionWeights(other, k)
    tensors = AttentionWeights(torch.from_numpy(q), torch.from_numpy(k))
    effects = one.effects(k[..., :3], q[..., :3])
    columns = one.part(columns=slice(5)), two.part(columns=slice(5))
    for error, ask, text in [
        (ValueError, lambda: regard.divergence(one, two, "js"), "kind is 'js'; 'kl', 'reverse_kl'"),
        (ValueError, lambda: regard.divergence(one, two, ["kl"]), r"kind is \['kl'\]; 'kl', "),
        (TypeError, lambda: regard.compare(one, q), "ndarray is no matrix of weights"),
        (TypeError, lambda: regard.compare(one, tensors), "compare: a and b are of several"),
        (regard.ShapeError, lambda: regard.compare(one, two.mix()), r"a is .* and b .*mix\(\)"),
        (regard.ShapeError, lambda: regard.compare(one, two).overlap(27), "overlap: k is 27"),
        (TypeError, lambda: regard.compare(one, two).divergences("kl"), "divergences: k is a str"),
        (TypeError, lambda: regard.compare(one, two).divergences(kinds="kl"), r"as in \['kl'\]"),
        (regard.UnsupportedError, lambda: regard.divergence(effects, two), "of whole rows"),
        (regard.UnsupportedError, lambda: regard.divergence(*columns), "of whole rows"),
        (
            regard.UnsupportedError,
            lambda: regard.compare(one, two).part(None, slice(3)).overlap(1),
            "of whole rows",
        ),
        (
            regard.UnsupportedError,
            lambda: regard.divergence(one.mix(coefficients=[1] * 4), two.mix()),
            "positive and sum to 1",
        ),
        (IndexError, lambda: regard.compare(one, two)[0, 9], "comparison: index 9 is out"),
    ]:
        with pytest.raises(error, match=text):
            ask()
    whole = np.asarray(regard.compare(*columns))  # the difference needs no whole rows
    np.testing.assert_allclose(whole, (np.asarray(one) - np.asarray(two))[..., :5], atol=1e-15)
    difference = np.asarray(regard.compare(effects, effects))
    assert not difference.any()
    empty = regard.compare(AttentionWeights(q, k[:, :, :0]), AttentionWeights(other, k[:, :, :0]))
    assert not np.asarray(empty.divergence("kl")).any()
    assert (empty.divergences().overlap == 1).all()
    none = regard.compare(AttentionWeights(q[:, :, :0], k), AttentionWeights(q[:, :, :0], k))
    assert none.divergence("kl").shape == (2, 4, 0)
    assert repr(regard.compare(one, two)).startswith("Comparison(2, 4, 23, 26) float64, computed")


@pytest.mark.parametrize("backend", ["kernel", "torch"])
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (name, kind)
        for name in ("plain", "causal", "sinks", "softcap and scale", "rows that see nothing")
        for kind in KINDS
        if (name, kind) != ("rows that see nothing", "kl")  # it is infinite
    ],
)
def test_divergences_have_the_gradient_of_the_formula(name, kind, backend):
    first, second = (
        {n: torch.as_tensor(x) if n == "sinks" else x for n, x in o.items()} for o in OPTIONS[name]
    )
    q, k, other = (torch.from_numpy(x).requires_grad_() for x in operands())
    upstream = torch.from_numpy(numbers(B, Hq, Lq)).double()
    a, b = (AttentionWeights(x, k, **o, backend=backend) for x, o in ((q, first), (other, second)))
    found = regard.divergence(a, b, kind)
    got = torch.autograd.grad((found * upstream).sum(), (q, k, other))
    plain = plain_divergence(kind, *(plain_rows(x, k, o) for x, o in ((q, first), (other, second))))
    expected = torch.autograd.grad((plain * upstream).sum(), (q, k, other))
    torch.testing.assert_close(found, plain, atol=1e-12, rtol=1e-9)
    for x, y in zip(got, expected):
        torch.testing.assert_close(x, y, atol=1e-12, rtol=1e-8)


def plain_rows(q, k, options):
    """Whole distributions ``(..., Lk + 1)`` and where they see something, in torch."""
    s = q @ k.repeat_interleave(Hq // Hkv, 1).mT * options.get("scale", D**-0.5)
    if "softcap" in options:
        s = options["softcap"] * torch.tanh(s / options["softcap"])
    seen = torch.ones(Lq, Lk, dtype=torch.bool)
    if options.get("causal"):
        seen = seen.tril(options.get("query_start", Lk - Lq))
    sinks = options.get("sinks", torch.full((Hq,), -torch.inf))
    rest = torch.where(seen.any(-1), sinks[:, None], 0.0).expand(B, -1, -1)[..., None]
    return torch.cat([s.masked_fill(~seen, -torch.inf), rest], -1).log_softmax(-1)


def plain_divergence(kind, a, b):
    """Of logarithms; −inf is a key that is masked."""
    if kind == "reverse_kl":
        return plain_divergence("kl", b, a)
    seen = [x > -torch.inf for x in (a, b)]
    logs = [torch.where(there, x, 0.0) for there, x in zip(seen, (a, b))]
    p, r = (torch.where(there, x.exp(), 0.0) for there, x in zip(seen, logs))
    if kind == "total_variation":
        return (p - r).abs().sum(-1) / 2
    if kind == "kl":
        ratio = torch.where(seen[1], logs[0] - logs[1], torch.inf)
        return torch.where(seen[0], p * ratio, 0.0).sum(-1)
    mean = torch.where(seen[0] | seen[1], (p + r) / 2, 1.0).log()
    return (
        sum(
            torch.where(there, x * (y - mean), 0.0).sum(-1)
            for there, x, y in zip(seen, (p, r), logs)
        )
        / 2
    )


def test_means_over_heads_have_gradients_too():
    q, k, other = (torch.from_numpy(x).requires_grad_() for x in operands())
    teacher, student = AttentionWeights(q.detach(), k.detach()), AttentionWeights(other, k)
    found = regard.divergence(teacher.mix(), student.mix([0, 3], [0.25, 0.75]))
    got = torch.autograd.grad(found.sum(), (k, other))
    a, b = (plain_rows(x, y, {}).exp() for x, y in ((q.detach(), k.detach()), (other, k)))
    a, b = a.mean(1)[..., :-1], (0.25 * b[:, 0] + 0.75 * b[:, 3])[..., :-1]
    plain = (a * (a / b).log()).sum(-1)
    torch.testing.assert_close(found, plain)
    for x, y in zip(got, torch.autograd.grad(plain.sum(), (k, other))):
        torch.testing.assert_close(x, y, atol=1e-12, rtol=1e-8)


def test_kinds_that_can_be_read_once_are_read_once():
    a, b = (AttentionWeights(numbers(5, 4, seed=n), numbers(5, 4, seed=n)) for n in (0, 1))
    comparison = regard.compare(a, b)
    found = comparison.divergences(kinds=(kind for kind in ("kl", "overlap")))
    assert list(found) == ["kl", "overlap"]
    with pytest.raises(TypeError, match="divergences: kinds is an int; a list of names is needed"):
        comparison.divergences(kinds=5)


@by_ways(*NAMED)
@pytest.mark.parametrize(
    ("dtype", "size"), [("float32", 1e18), ("float64", 1e30), ("float64", 1e150)]
)
def test_scores_near_the_largest_number_have_exact_weights_and_divergences(dtype, size, way):
    q, k, v = (numbers(2, 7, 4, seed=n).astype(dtype) for n in range(3))
    one, other = (x.astype(float) @ k.astype(float).swapaxes(-1, -2) / 2 for x in (q, q[:, ::-1]))
    first, second = one.argmax(-1)[..., None], other.argmax(-1)[..., None]
    q, k = (x * x.dtype.type(size) for x in (q, k))
    output, weights = way.ask(q, k, v, return_weights=True)
    np.testing.assert_array_equal(np.asarray(output), np.take_along_axis(v, first, 1))
    np.testing.assert_array_equal(np.asarray(weights), np.eye(7)[first[..., 0]])
    assert not np.asarray(weights.entropy()).any()
    lse = np.take_along_axis(one, first, -1)[..., 0] * size * size
    np.testing.assert_allclose(np.asarray(weights.lse), lse, rtol=1e-5)
    np.testing.assert_allclose(np.asarray(weights.max_score), lse.max(-1), rtol=1e-5)
    others = AttentionWeights(*map(way.convert, (q[:, ::-1].copy(), k)), backend=way.backend)
    lost = (other.max(-1) - np.take_along_axis(other, first, -1)[..., 0]) * size * size
    assert (lost > 0).any()
    found = np.asarray(regard.divergence(weights, others))
    np.testing.assert_allclose(found, lost, rtol=1e-4)
    apart = np.asarray(regard.divergence(weights, others, "total_variation"))
    np.testing.assert_array_equal(apart, (first != second)[..., 0])
