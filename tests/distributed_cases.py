"""What every rank of a group checks: attention of its tokens against that of one process."""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import itertools
import math
import os
import signal
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.experimental._context_parallel import _load_balancer
from torch.fx.experimental.proxy_tensor import make_fx

import regard
from regard._operator import watching
from regard.distributed import Layout, RankError, attention
from wholes import CASES, T, inputs

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
ORDERS = ("zigzag", "contiguous", "striped")
# Options together where each is told by the numbers all the same.
TOGETHER = (
    "full", "causal", "causal window", "window + scattered ids", "documents + sinks",
    "lengths + cap", "intervals + bias", "mask + edits", "dropout", "large scores",
    "sinks above all", "nobody sees",
)  # fmt: skip


def tensors(x, dtype):
    if isinstance(x, tuple):
        return tuple(tensors(y, dtype) for y in x)
    if isinstance(x, np.ndarray):
        x = torch.from_numpy(x)
        return x.to(dtype) if x.is_floating_point() else x
    return x


def local(options, layout):
    """The options as a rank gives them: rows of a mask or bias are its own."""
    found = dict(options)
    for name in ("mask", "bias"):
        if name in found and found[name].shape[-2] != 1:
            found[name] = layout.shard(found[name].detach(), -2)
    return found


def leaf(x):
    return x.detach().clone().requires_grad_()


def one_process(arrays, grad, options):
    """Output, gradients and what the weights of the whole say."""
    leaves = [leaf(x) for x in arrays]
    more = {name: leaf(options[name]) for name in ("bias", "sinks") if name in options}
    out, weights = regard.attention(*leaves, query_start=0, return_weights=True, **(options | more))
    found = torch.autograd.grad(out, [*leaves, *more.values()], grad)
    return out.detach(), dict(zip(("query", "key", "value", *more), found)), Facts.of(weights)


class Facts(NamedTuple):
    """What weights say of themselves, computed once, before the ranks are forked."""

    weights: regard.AttentionWeights
    matrix: torch.Tensor
    summary: regard.WeightsSummary
    masses: torch.Tensor

    @classmethod
    def of(cls, weights):
        return cls(weights, weights[...].detach(), *asked(weights))


def asked(weights):
    """What is asked of one process and of ranks alike."""
    summary = weights.summary(topk=min(5, weights.shape[-1]), strongest=9, pool=(7, 6))
    return summary, weights.pool((7, 6), "mass")


def over_ranks(arrays, grad, options, layout, **how):
    leaves = [leaf(layout.shard(x, -2)) for x in arrays]
    own = local(options, layout)
    more = {name: leaf(own[name]) for name in ("bias", "sinks") if name in own}
    out, weights = attention(*leaves, layout=layout, return_weights=True, **(own | more), **how)
    found = torch.autograd.grad(out, [*leaves, *more.values()], layout.shard(grad, -2))
    return out.detach(), dict(zip(("query", "key", "value", *more), found)), weights


def rms(x):
    return float(x.double().square().mean().sqrt()) if x.numel() else 0.0


class Checks:
    """What did not hold; told at the end, for the ranks to stay together.

    Args:
        bound: of float64, in parts of the largest number.
        rounding: of float32, likewise.
    """

    def __init__(self, bound=1e-13, rounding=6e-8):
        self.bound, self.rounding, self.failed = bound, rounding, []

    def that(self, holds, told):
        if not holds:
            self.failed.append(told)

    def close(self, found, exact, one, name, rounding=0.0):
        """Float64 to the bound; else within twice what one process is off by, and a rounding."""
        same = found.shape == exact.shape and found.dtype == one.dtype
        self.that(same, f"{name}: {found.dtype} {found.shape}, {one.dtype} {exact.shape}")
        if not same:
            return
        bound = self.rounding if found.dtype == torch.float32 else self.bound
        found, exact, one = (x.detach().double() for x in (found, exact, one))
        self.that(torch.equal(found.isnan(), exact.isnan()), f"{name}: NaN elsewhere")
        found, exact, one = (x.nan_to_num(0.0) for x in (found, exact, one))
        largest = max(1.0, float(exact.abs().max())) if exact.numel() else 1.0
        error, own = rms(found - exact), rms(one - exact)
        allowed = 2 * own + bound * largest + rounding
        self.that(error <= allowed, f"{name}: {error:.3g}, of one {own:.3g}")

    def raise_any(self):
        assert not self.failed, "; ".join(self.failed)


@functools.cache
def expected(name, dtype, length):
    """Inputs and options of a dtype, and what one process gives, in float64 and in that dtype."""
    kind = DTYPES[dtype]
    rounded = [tensors(x, kind)[:, :, :length].contiguous() for x in inputs()]
    together = {key: x for part in name.split(" + ") for key, x in CASES[part].items()}
    options = {key: shortened(key, tensors(x, kind), length) for key, x in together.items()}
    results = []
    for own in dict.fromkeys((torch.float64, kind)):
        of = {key: x.to(own) if key in ("bias", "sinks") else x for key, x in options.items()}
        *arrays, grad = (x.to(own) for x in rounded)
        results.append(one_process(arrays, grad, of))
    return rounded, options, results[0], results[-1]


def shortened(name, x, length):
    """An option of the first tokens of the whole."""
    if name in ("segments", "intervals"):
        return tuple(y[..., :length] for y in x) if isinstance(x, tuple) else x[..., :length]
    return x[..., :length, :length] if name in ("mask", "bias") else x


def compare(name, order, dtype="float64", length=T, **how):
    """One case: everything that a rank gives, against one process of that dtype and of float64."""
    layout = Layout(length, None, order)
    rounded, options, exact, one = expected(name, dtype, length)
    *arrays, grad = rounded
    # Maxima of 1e5 travel in another unit than the kernels', which rounds the totals once more.
    checks = Checks(3e-12, 1.2e-7) if "large scores" in name else Checks()
    out, grads, weights = over_ranks(arrays, grad, options, layout, **how)
    shard = functools.partial(layout.shard, dim=-2)
    checks.close(out, shard(exact[0]), shard(one[0]), "output")
    for key, x in grads.items():
        y, z = exact[1][key], one[1][key]
        rounding = 0.0
        if key == "sinks":  # each rank rounds what its queries contribute
            parts = layout.peers.all_gather("test", x.double())
            rounding = rms(sum(part.abs() for part in parts)) * torch.finfo(x.dtype).eps / 2
            x = sum(parts).to(x.dtype)
        else:
            y, z = shard(y), shard(z)
        if dtype == "bfloat16" and key in ("query", "key"):
            rounding = of_differences(*arrays, grad, key, options.get("scale"))
        checks.close(x, y, z, f"gradient of {key}", rounding)
    of_weights(checks, weights, exact[2], one[2], layout)
    checks.raise_any()


def of_differences(query, key, value, grad, name, scale):
    """Rounding of float32 in ``dw − delta``, which one process takes from the same products.

    Where one key has all the weight that difference is 0, and its rounding is the gradient.
    """
    lengths = (grad, value, key if name == "query" else query)
    lengths = [float(x.double().norm(dim=-1).max()) for x in lengths]
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return math.prod(lengths) * scale * torch.finfo(torch.float32).eps / 2


def of_weights(checks, weights, exact, one, layout):
    rows, shard = (functools.partial(layout.shard, dim=dim) for dim in (-1, -2))
    checks.that(weights.shape == one.matrix.shape, "shape")
    found, masses = asked(weights)
    for name in ("lse", "entropy", "distance", "received"):
        x, y = (rows(getattr(of_it.summary, name)) for of_it in (exact, one))
        checks.close(getattr(found, name), x, y, name)
    top, *of_whole = found.topk, exact.summary.topk, one.summary.topk
    checks.close(top.values, *(shard(x.values) for x in of_whole), "topk")
    got = torch.gather(shard(one.matrix), -1, top.indices) * (top.values > 0)
    checks.that(torch.allclose(got, top.values, atol=1e-5), "keys of topk")
    links, *of_whole = found.strongest, exact.summary.strongest, one.summary.strongest
    checks.close(links.weight, *(x.weight for x in of_whole), "strongest")
    checks.that(torch.equal(links.query < 0, of_whole[0].query < 0), "pairs that are none")
    if one.matrix.dtype == torch.float64 and layout.length:
        places = (links.query * layout.length + links.key).clamp(min=0)
        got = one.matrix.flatten(-2).gather(-1, places) * (links.query >= 0)
        checks.that(torch.allclose(got, links.weight, atol=1e-12), "places of links")
    of_whole = found.pooled, exact.summary.pooled, one.summary.pooled
    checks.close(*(x.exp() for x in of_whole), "pool max")
    checks.close(*(x.exp() for x in (masses, exact.masses, one.masses)), "pool mass")
    if layout.length:
        position = layout.length // 2
        row = weights.row(position)
        checks.close(row, *(of_it.matrix[..., position, :] for of_it in (exact, one)), "row")


def every_method_gives_its_part_of_the_summary(size):
    layout = Layout(23)
    whole, (q, k, v) = small(layout)
    _, weights = attention(q, k, v, layout=layout, causal=True, return_weights=True)
    one = regard.AttentionWeights(*whole[:2], causal=True)
    every = weights.summary(topk=4, strongest=7, pool=(5, 4))
    for name in ("entropy", "distance", "received"):
        found = getattr(weights, name)()
        assert torch.allclose(found, getattr(every, name), atol=1e-13), name
    assert all(map(torch.equal, weights.topk(4), every.topk))
    all_keys = weights.summary(topk=np.int64(99), only=["topk"]).topk
    assert all(map(torch.equal, weights.topk(23), all_keys))
    assert all(map(torch.equal, weights.strongest(7), every.strongest))
    assert torch.equal(weights.strongest(7).query, one.strongest(7).query)
    assert torch.equal(weights.strongest(7).key, one.strongest(7).key)
    assert torch.equal(weights.pool((5, 4)).nan_to_num(1), every.pooled.nan_to_num(1))
    assert weights.dtype == torch.float64
    for how, queries in (
        ("mean", None), ("max", None), ("seen", slice(1, 20, 3)), ("sum", slice(5, 17)),
        ("mean", slice(3, None, 4)), ("max", slice(-3, 99)), ("seen", slice(9, 9)),
    ):  # fmt: skip
        found, wanted = weights.received(how, queries), one.received(how, queries)
        assert torch.allclose(found, layout.shard(wanted, -1), atol=1e-14), (how, queries)
    assert torch.allclose(weights.row(11), one[:, 11], atol=1e-14)
    assert torch.allclose(weights.lse, layout.shard(one.lse, -1), atol=1e-13)
    assert torch.equal(every.lse, weights.lse)
    assert weights.summary(only=["lse"]).entropy is None


def keys_receive_from_the_queries_that_see_them(size):
    layout = Layout(T, None, "striped")
    for name in ("mask + edits", "nobody sees"):
        rounded, options, _, one = expected(name, "float64", T)
        shards = [layout.shard(x, -2) for x in rounded[:3]]
        own = local(options, layout)
        _, weights = attention(*shards, layout=layout, return_weights=True, **own)
        queries = slice(7, 40, 3) if name == "nobody sees" else None
        wanted = one[2].weights.received("seen", queries)
        found = weights.received("seen", queries)
        assert torch.allclose(found, layout.shard(wanted, -1), atol=1e-13), name


def a_rank_with_one_query_has_a_row_of_the_bias_or_one_of_all(size):
    lengths = (2 * size - 1, "striped"), (size, "zigzag"), (1, "contiguous")
    for n, (length, order) in enumerate(lengths[: 4 - size or 1]):
        layout = Layout(length, None, order)
        whole, (q, k, v) = small(layout, Hq=2 * size, Hkv=size)
        each = torch.arange(2.0 * size * length**2, dtype=torch.float64).cos()
        each = each.reshape(2 * size, length, length)
        mask = each[0] > -0.5
        for bias, seen in (
            (each, None),
            (each[:, :1], mask),
            (each[:1], mask[:1]),
            (each[0], mask),
        )[n : n + 2]:
            one, exact = regard.attention(*whole, bias=bias, mask=seen, return_weights=True)
            own = local({"bias": bias} | ({} if seen is None else {"mask": seen}), layout)
            for method in ("ring", "heads"):
                out, weights = attention(
                    q, k, v, layout=layout, method=method, return_weights=True, **own
                )
                assert torch.allclose(out, layout.shard(one, -2), atol=1e-13), (length, method)
            row = weights.row(length - 1)
            assert torch.allclose(row, exact[:, length - 1], atol=1e-13), length


def comparisons(size):
    """By name the comparisons that a group of that size makes."""
    found = {}

    def add(name, order="zigzag", dtype="float64", **how):
        told = ", ".join([name, order, dtype, *(f"{k}={x}" for k, x in how.items())])
        found[told] = functools.partial(compare, name, order, dtype, **how)

    if size == 1:
        for n, name in enumerate(TOGETHER):
            add(name, ORDERS[n % 3])
        add("cap", "striped", "bfloat16")
        return found
    for n, name in enumerate(TOGETHER):
        add(name, ORDERS[(n + size) % 3])
    add("cap", "striped", "bfloat16")
    add("documents + sinks" if size == 2 else "bias", "zigzag", "float32")
    for name in ("documents + sinks", "large scores", "dropout" if size == 2 else "bias"):
        add(name, "zigzag", "bfloat16")
    if size == 2:
        add("causal window", method="gather")
        for name in ("documents + sinks", "mask + edits", "bias"):
            add(name, ORDERS[len(name) % 3], method="heads")
    for length in (0, 3, 7)[: 4 // size + 1]:
        add("causal window", ORDERS[length % 3], length=length)
    return found


def raised(kind, call):
    """The text of the error that a call raises; every rank calls it."""
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__}")


def small(layout, *, Hq=2, Hkv=1, seed=0, dtype=torch.float64):
    """Query, key and value of a sequence, and those of this rank."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (Hq, 4), (Hkv, 4), (Hkv, 3)
    whole = [torch.randn(h, layout.length, n, generator=generator, dtype=dtype) for h, n in shapes]
    return whole, [layout.shard(x, -2) for x in whole]


def layouts_cut_and_join(size):
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("cp",))
    for length in (0, 1, 5, 33):
        whole = torch.arange(3.0 * length).reshape(3, length)
        for order in ORDERS:
            layout = Layout(length, mesh["cp"], order)
            own = layout.shard(whole, 1)
            assert own.shape == (3, layout.count)
            assert sum(layout.counts) == length
            assert torch.equal(own, whole[:, layout.positions])
            leaf_ = own.clone().requires_grad_()
            joined = layout.gather(leaf_, -1)
            assert torch.equal(joined, whole)
            factor = (layout.rank + 1.0) * (1 + whole)
            (grad,) = torch.autograd.grad((joined * factor).sum(), leaf_)
            assert torch.equal(grad, size * (size + 1) / 2 * (1 + own))
            assert str(length) in repr(layout)


def layouts_join_complex_numbers(size):
    layout = Layout(5)
    whole = torch.arange(10.0).reshape(5, 2).mul(1 + 2j).conj()
    own = leaf(layout.shard(whole, 0))
    joined = layout.gather(own, 0)
    assert torch.equal(joined, whole)
    (grad,) = torch.autograd.grad((joined * whole).abs().square().sum(), own)
    assert torch.allclose(grad, size * 2 * own.detach() * own.detach().abs().square())
    (grad,) = torch.autograd.grad(layout.gather(own, 0).conj(), own, whole.conj())
    assert torch.equal(grad, size * layout.shard(whole, 0))
    assert torch.equal(layout.gather(layout.shard(whole, 0), 0), whole)


def zigzag_is_the_order_of_torchs_load_balancer(size):
    length = 12 * size
    order = _load_balancer._HeadTailLoadBalancer(length, size, "cpu")._generate_indices()
    layout = Layout(length)
    own = order.flatten().reshape(size, -1)[layout.rank]
    assert torch.equal(own, layout.positions)


def layouts_refuse(size):
    layout = Layout(9)
    for kind, said, call in (
        (TypeError, "length is a float; an int", lambda: Layout(3.0)),
        (ValueError, "length is -1; it must not", lambda: Layout(-1)),
        (ValueError, "order is 'zag'; one of 'zigzag'", lambda: Layout(3, None, "zag")),
        (TypeError, "mesh is an int; a DeviceMesh", lambda: Layout(3, 4)),
        (TypeError, "shard: x is a list", lambda: layout.shard([1], 0)),
        (regard.ShapeError, "8 tokens along axis 0; 9", lambda: layout.shard(torch.zeros(8), 0)),
        (regard.ShapeError, "dim is 2, and x has 1 axis.", lambda: layout.shard(torch.zeros(9), 2)),
        (
            TypeError,
            "shard: dim None is a NoneType; an int",
            lambda: layout.shard(torch.zeros(9), None),
        ),
        (TypeError, "gather: dim 'x' is a str; an int", lambda: layout.gather(torch.zeros(9), "x")),
        (regard.ShapeError, "99 tokens along", lambda: layout.gather(torch.zeros(99), 0)),
        (IndexError, "no position 9", lambda: layout.holder(9)),
    ):
        assert said in raised(kind, call), said
    mesh = init_device_mesh("cpu", (1, size), mesh_dim_names=("tp", "cp"))
    assert "2 dimensions" in raised(ValueError, lambda: Layout(3, mesh))
    assert Layout(3, mesh["cp"]).size == size
    for one in (torch.distributed.new_group([0]), DeviceMesh("cpu", [0])):
        if layout.rank == 0:
            assert Layout(3, one).size == 1
        else:
            text = raised(ValueError, lambda x=one: Layout(3, x))
            assert text == "Layout: this process is not in the group.", text


def a_call_that_every_rank_gets_wrong_is_told_in_its_own_words(size):
    layout = Layout(9)
    _, (q, k, v) = small(layout)
    for kind, said, options in (
        (ValueError, "query_start is given; the layout", {"query_start": 3}),
        (ValueError, "method is 'star'; one of 'ring'", {"method": "star"}),
        (TypeError, "no option 'casual'", {"casual": True}),
        (TypeError, "return_weights is 1; True or False", {"return_weights": 1}),
        (ValueError, "window is (-1, 0)", {"window": (-1, 0)}),
        (regard.ShapeError, "segments has shape (8,)", {"segments": torch.zeros(8, dtype=int)}),
        (regard.ShapeError, "bias", {"bias": torch.zeros(2, layout.count, 8)}),
        (regard.ShapeError, "keys is 9; there are 9", {"edits": [regard.Edit(keys=9)]}),
        (regard.ShapeError, "sinks has shape (3,)", {"sinks": torch.zeros(3).double()}),
        (ValueError, "seed", {"dropout": 0.5, "seed": 2**70}),
        (regard.ShapeError, "key_lengths are from 10 to 10", {"key_lengths": 10}),
        (regard.ShapeError, "key_lengths are from -1 to -1", {"key_lengths": [-1]}),
    ):
        assert said in raised(kind, lambda o=options: attention(q, k, v, layout=layout, **o)), said
    sparse = q.to_sparse()
    text = raised(regard.UnsupportedError, lambda: attention(sparse, k, v, layout=layout))
    assert text.startswith("distributed.attention: query is a tensor of layout torch.sparse"), text
    wrong = torch.zeros(2, layout.count + 1, 4).double()
    assert "tokens; rank" in raised(
        regard.ShapeError, lambda: attention(wrong, k, v, layout=layout)
    )
    assert "query has 1 axis; at least" in raised(
        regard.ShapeError, lambda: attention(wrong[0, 0], k, v, layout=layout)
    )
    assert "query is an ndarray" in raised(
        TypeError, lambda: attention(q.numpy(), k, v, layout=layout)
    )
    with watching.watched(lambda *_: None):
        text = raised(regard.UnsupportedError, lambda: attention(q, k, v, layout=layout))
    assert "regard.record or regard.watch looks on" in text, text
    assert "layout is an int" in raised(TypeError, lambda: attention(q, k, v, layout=9))


def a_rank_that_disagrees_is_named_on_every_rank(size):
    layout, last = Layout(9), size - 1
    _, (q, k, v) = small(layout)
    odd = layout.rank == last
    for said, options in (
        ("causal", {"causal": odd}),
        ("window", {"window": (3, 1) if odd else (3, None)}),
        ("segments", {"segments": torch.arange(9) // (2 + odd)}),
        ("method", {"method": "gather" if odd else "ring"}),
        ("sinks", {"sinks": torch.zeros(2).double()} if odd else {}),
        ("scale", {"scale": 0.5 + odd}),
        ("seed", {"dropout": 0.5, "seed": 3 + odd}),
        ("edits", {"edits": [regard.Edit(keys=n % 9, factor=2.0 + odd) for n in range(200)]}),
        ("the rows of bias", {"bias": torch.zeros(1 if odd else layout.count, 9).double()}),
        ("requires_grad of sinks", {"sinks": torch.zeros(2).double().requires_grad_(odd)}),
    )[:: size // 2]:
        text = raised(ValueError, lambda o=options: attention(q, k, v, layout=layout, **o))
        assert f"disagree about {said}" in text, text
        assert f"rank {last} has" in text, text
        assert len(text) < 2000, text
    other = Layout(9 + odd)
    shards = [torch.zeros(1, other.count, 4)] * 3
    text = raised(ValueError, lambda: attention(*shards, layout=other))
    assert "disagree about layout" in text, text
    assert f"rank {last} has 10 tokens" in text, text
    if odd:
        assert "window is 3" in raised(
            TypeError, lambda: attention(q, k, v, layout=layout, window=3)
        )
    else:
        text = raised(RankError, lambda: attention(q, k, v, layout=layout, window=(3, 0)))
        assert f"rank {last} refused the call: TypeError: attention: window is 3" in text
    refused = {"backend": "none" if odd else "auto"}
    kind = ValueError if odd else RankError
    assert "backend is 'none'" in raised(kind, lambda: attention(q, k, v, layout=layout, **refused))
    _, weights = attention(q, k, v, layout=layout, return_weights=True)
    text = raised(ValueError, lambda: weights.topk(2 + odd))
    assert "disagree about topk" in text, text
    text = raised(ValueError, lambda: weights.received(queries=slice(odd, None)))
    assert "disagree about received" in text, text
    own = q.clone().requires_grad_(odd)
    assert "about requires_grad" in raised(ValueError, lambda: layout.gather(own, 1))
    leaves = [leaf(x) for x in (q, k, v)]
    out = attention(*leaves, layout=layout)
    text = raised(ValueError, weights.entropy if odd else lambda: out.sum().backward())
    assert "disagree about what is called: rank" in text, text
    assert f"have attention's gradient; rank {last} has weights" in text.replace("0 has", "0 have")
    assert torch.isfinite(attention(q, k, v, layout=layout)).all()  # the group goes on


def an_output_has_the_dtype_that_is_asked_for_in_any_form(size):
    layout = Layout(9)
    _, given = small(layout, dtype=torch.float16)
    for method in ("ring", "gather"):
        for dtype in (torch.float16, torch.float32):
            name = str(dtype).removeprefix("torch.")
            for asked in (dtype, name, getattr(np, name), np.dtype(name)):
                out = attention(*given, layout=layout, method=method, output_dtype=asked)
                assert out.dtype == dtype, (asked, out.dtype)
    first = layout.rank == 0  # one asks for what the others have by default
    asked = {"output_dtype": np.float16, "query_start": None} if first else {}
    assert attention(*given, layout=layout, **asked).dtype == torch.float16


def weights_refuse(size):
    layout = Layout(9)
    _, (q, k, v) = small(layout)
    _, weights = attention(q, k, v, layout=layout, return_weights=True)
    assert "DistributedWeights(2, 9, 9)" in repr(weights)
    assert weights.layout is layout
    for kind, said, call in (
        (regard.ShapeError, "k is 10", lambda: weights.topk(10)),
        (TypeError, "k is a float", lambda: weights.topk(2.0)),
        (ValueError, "how is 'most'", lambda: weights.received("most")),
        (ValueError, "n is -1", lambda: weights.strongest(-1)),
        (TypeError, "n is a str", lambda: weights.strongest("2")),
        (TypeError, "size is 3", lambda: weights.pool(3)),
        (TypeError, "n is a bool", lambda: weights.strongest(True)),
        (ValueError, "how is 'some'", lambda: weights.pool((2, 2), "some")),
        (ValueError, "there is no 'mass'; there are lse", lambda: weights.summary(only=["mass"])),
        (TypeError, "queries is an int; a slice", lambda: weights.received("sum", 3)),
        (ValueError, "queries has the step -1", lambda: weights.received("sum", slice(9, 0, -1))),
        (
            TypeError,
            "is slice(0.5, 3, None); a slice of ints",
            lambda: weights.received("sum", slice(0.5, 3)),
        ),
        (IndexError, "position is 9", lambda: weights.row(9)),
        (
            TypeError,
            "position slice(0, 2, None) is a slice; an int",
            lambda: weights.row(slice(0, 2)),
        ),
        (TypeError, "position True is a bool; an int is needed", lambda: weights.row(True)),
        (TypeError, "only is a str; a list of names", lambda: weights.summary(only="entropy")),
    ):
        assert said in raised(kind, call), said
    assert torch.equal(weights.row(-1), weights.row(8))
    assert torch.equal(weights.strongest(np.int64(3)).query, weights.strongest(3).query)
    kept, entropy = weights.copy(), weights.entropy()
    if layout.rank == 0:
        k += 1
        assert "key was written to" in raised(RuntimeError, weights.entropy)
    else:
        assert "rank 0 refused the call: RuntimeError" in raised(RankError, weights.entropy)
    assert torch.equal(kept.entropy(), entropy)
    if layout.rank == 0:
        assert "k is a str" in raised(TypeError, lambda: kept.summary(topk="3"))
    else:
        text = raised(RankError, lambda: kept.summary(topk=3))
        assert "rank 0 refused the call: TypeError" in text, text
    _, weights = attention(q, k, v, layout=layout, return_weights=True)
    if layout.rank == 0:
        assert "only is an int" in raised(TypeError, lambda: weights.summary(only=5))
    else:
        text = raised(RankError, lambda: weights.summary(only=["entropy"]))
        assert "rank 0 refused the call: TypeError: summary: only is an int" in text, text
    given_once = weights.summary(only=(name for name in ("entropy", "lse")))
    assert given_once.entropy is not None
    assert given_once.lse is not None
    assert weights.strongest(0).weight.shape == (2, 0)
    assert weights.summary(only=["entropy"]).received is None


def a_limit_refuses_before_anything_is_sent(size):
    layout = Layout(9)
    _, (q, k, v) = small(layout)
    _, weights = attention(q, k, v, layout=layout, return_weights=True)
    for said, ask in (
        ("strongest: (2, 9) pairs", lambda: weights.strongest(9)),
        ("topk: (2, ", lambda: weights.topk(9)),
        ("6, 5) float64", lambda: weights.pool((6, 5))),
        ("row: (2, 9) float64", lambda: weights.row(3)),
    ):
        with regard.limits(weights_bytes=100 if layout.rank == 0 else 1e9):  # of one rank alone
            text = raised(regard.MaterializeError if layout.rank == 0 else RankError, ask)
        assert said in text, text
        ask()  # the group goes on


def options_that_are_written_to_are_told(size):
    """By gradients and weights: both read them again."""
    layout = Layout(9)
    _, own = small(layout)
    numbers = torch.arange(9)
    for name, x in (
        ("mask", torch.ones(layout.count, 9, dtype=torch.bool)),
        ("segments", numbers // 4),
        ("intervals", (0 * numbers, numbers + 1)),
        ("key_lengths", torch.tensor(7)),
        ("sinks", torch.ones(2).double()),
    ):
        leaves = [leaf(y) for y in own]
        out, weights = attention(*leaves, layout=layout, return_weights=True, **{name: x})
        kept, asked = weights.copy(), (weights.row(8), weights.entropy())
        (x[1] if isinstance(x, tuple) else x).zero_()
        for call in (weights.entropy, lambda w=weights: w.row(8)):
            assert f"{name} was written to" in raised(RuntimeError, call), name
        text = raised(RuntimeError, lambda y=out: y.sum().backward())
        assert name == "sinks" or f"{name} was written to since the output" in text, text
        assert all(map(torch.equal, (kept.row(8), kept.entropy()), asked)), name
    seed, leaves = torch.tensor(3), [leaf(y) for y in own]
    outs = [attention(*leaves, layout=layout, dropout=0.5, seed=x) for x in (3, seed)]
    seed += 1
    assert torch.equal(*(torch.autograd.grad(y.sum(), leaves)[2] for y in outs))


def a_gradient_that_one_rank_cannot_give_is_told_by_every_other(size):
    layout = Layout(9)
    _, own = small(layout)
    q, k, v = (2 * leaf(x) for x in own)
    out = attention(q, k, v, layout=layout)
    if layout.rank == 0:
        k.detach().zero_()
        assert "modified by an inplace" in raised(RuntimeError, lambda: out.sum().backward())
    else:
        text = raised(RankError, lambda: out.sum().backward())
        assert "attention's gradient: rank 0 refused the call: RuntimeError" in text, text
    assert torch.isfinite(attention(*own, layout=layout)).all()  # the group goes on


def a_gradient_of_heads_that_one_rank_cannot_give_is_told_by_every_other(size):
    layout, wide = Layout(9), torch.float64
    _, own = small(layout, Hq=size, Hkv=size)
    for name, x in (
        ("sinks", torch.ones(size, dtype=wide)),
        ("bias", torch.ones(1, 9, dtype=wide)),
        ("key_lengths", torch.tensor(7)),
    ):
        leaves = [leaf(y) for y in own]
        out = attention(*leaves, layout=layout, method="heads", **{name: x})
        if layout.rank == 0:
            x.zero_()
            text = raised(RuntimeError, lambda y=out: y.sum().backward())
            assert f"{name} was written to since the output" in text, text
        else:
            text = raised(RankError, lambda y=out: y.sum().backward())
            assert "attention's gradient: rank 0 refused the call: RuntimeError" in text, text
    assert torch.isfinite(attention(*own, layout=layout)).all()  # the group goes on
    mask = torch.ones(layout.count, 9, dtype=torch.bool)
    grads = []
    for written in (False, True):
        leaves = [leaf(y) for y in own]
        out = attention(*leaves, layout=layout, method="heads", mask=mask)
        if written:  # of which the ranks have copies
            mask.zero_()
        grads.append(torch.autograd.grad(out.sum(), leaves))
    assert all(map(torch.equal, *grads))


def gradients_of_different_calls_are_told(size):
    layout = Layout(9)
    _, own = small(layout, Hq=size, Hkv=size)
    for method in ("ring", "heads"):
        outs = [attention(*map(leaf, own), layout=layout, method=method) for _ in range(2)]
        out = outs[layout.rank > 0]
        text = raised(ValueError, lambda out=out: out.sum().backward())
        assert "gradient: the ranks disagree about the call that it is of: rank 0 has" in text, text
    leaves = [leaf(x) for x in own]
    attention(*leaves, layout=layout).sum().backward()  # the group goes on
    assert all(torch.isfinite(x.grad).all() for x in leaves)


def a_rank_may_ask_for_fewer_gradients_than_the_others(size):
    layout = Layout(9)
    whole, own = small(layout, Hq=2 * size, Hkv=size)
    bias = torch.arange(162.0 * size, dtype=torch.float64).sin()
    more = [bias.reshape(2 * size, 9, 9), torch.ones(2 * size, dtype=torch.float64)]
    for of_bias in (slice(None), slice(1)):  # exchanged with the heads, or whole
        bias, sinks = more[0][of_bias], more[1]
        one = [leaf(x) for x in (*whole, bias, sinks)]
        out = regard.attention(*one[:3], bias=one[3], sinks=one[4])
        wanted = [layout.shard(x, -2) for x in torch.autograd.grad(out.square().sum(), one)[:4]]
        for method, few in itertools.product(("ring", "heads"), ((0,), (1, 2), (3,), (4,))):
            leaves = [leaf(x) for x in (*own, layout.shard(bias, -2), sinks)]
            options = {"bias": leaves[3], "sinks": leaves[4], "method": method}
            out = attention(*leaves[:3], layout=layout, **options)
            asked = few if layout.rank == 0 else range(5)
            grads = torch.autograd.grad(out.square().sum(), [leaves[n] for n in asked])
            for n, grad in zip(asked, grads):
                assert n == 4 or torch.allclose(grad, wanted[n], atol=1e-12), (method, few, n)


def a_rank_may_ask_for_fewer_second_gradients_than_the_others(size):
    layout = Layout(9)
    whole, own = small(layout, Hq=2 * size, Hkv=size)
    leaves, one = [leaf(x) for x in own], [leaf(x) for x in whole]
    counts = [1] + [3] * (size - 1)
    asked = leaves[: counts[layout.rank]]
    out = attention(*leaves, layout=layout, method="heads").square().sum()
    grads = torch.autograd.grad(out, asked, create_graph=True)
    found = torch.autograd.grad(sum(x.square().sum() for x in grads), asked)
    out = regard.attention(*one).square().sum()
    grads = torch.autograd.grad(out, one, create_graph=True)
    parts = [layout.tokens(x, -2, r) for r, count in enumerate(counts) for x in grads[:count]]
    wanted = torch.autograd.grad(sum(x.square().sum() for x in parts), one)
    for x, y in zip(found, wanted):
        assert torch.allclose(x, layout.shard(y, -2), atol=1e-12)


def a_compiled_model_computes_it_between_its_graphs(size):
    layout = Layout(9)
    _, own = small(layout)

    def model(q, k, v):
        out, weights = attention(2 * q, k, v, layout=layout, causal=True, return_weights=True)
        return out + 1, layout.gather(out, -2).sum(), weights.received(), weights.row(3)

    found = []
    for call in (model, torch.compile(model, backend="eager")):
        leaves = [leaf(x) for x in own]
        results = call(*leaves)
        found.append([*results, *torch.autograd.grad(results[0].sum() + results[1], leaves)])
    assert all(map(torch.equal, *found))


def a_graph_or_a_transform_is_refused_and_the_group_goes_on(size):
    layout = Layout(9)
    _, (q, k, v) = small(layout)
    _, weights = attention(q, k, v, layout=layout, return_weights=True)
    for call in (
        lambda x: attention(x, k, v, layout=layout),
        lambda x: layout.gather(x, -2),
        lambda x: x + weights.entropy()[..., None],
    ):
        for way in (
            lambda f: torch.func.vmap(f)(torch.stack([q, q])),
            lambda f: torch.func.grad(lambda x: f(x).sum())(q),
            lambda f: make_fx(f)(q),
            lambda f: torch.jit.trace(f, q),
        ):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of the tracer
                text = raised(regard.UnsupportedError, functools.partial(way, call))
            assert "messages between ranks cannot become part of a graph" in text, text
    kind, ask = RankError, weights.entropy
    if layout.rank == 0:  # a transform of one rank is told to all
        kind = regard.UnsupportedError
        ask = functools.partial(torch.func.vmap(lambda x: x + weights.entropy().sum()), q)
    assert "messages between ranks" in raised(kind, ask)
    assert torch.isfinite(attention(q, k, v, layout=layout)).all()


def a_row_of_large_scores_has_the_sum_of_one_process(size):
    """In float32, where the pass over all rows sums products in another order than that of one."""
    layout = Layout(T)
    arrays, options, _, (_, _, one) = expected("large scores", "float32", T)
    own = [layout.shard(x, -2) for x in arrays[:3]]
    _, weights = attention(*own, layout=layout, return_weights=True, **options)
    for position in (0, 1, T // 2, T - 1):
        found, wanted = weights.row(position), one.matrix[..., position, :]
        assert torch.allclose(found, wanted, atol=2e-7), (position, float(found.sum(-1).min()))


def dropout_without_a_seed_is_the_same_on_every_rank(size):
    layout = Layout(64)
    whole, (q, k, v) = small(layout)
    torch.manual_seed(3 + layout.rank)
    out = layout.gather(attention(q, k, v, layout=layout, dropout=0.5), -2)
    torch.manual_seed(3)
    seed = int(torch.randint(2**62, ()))
    one = regard.attention(*whole, dropout=0.5, seed=seed)
    assert torch.allclose(out, one, atol=1e-13)


def a_second_gradient_is_that_of_one_process_or_refused(size):
    layout = Layout(9)
    whole, own = small(layout, Hq=size, Hkv=size)

    def second(given, **options):
        query, *rest = given
        query.requires_grad_()
        out = (attention if options else regard.attention)(query, *rest, **options)
        (first,) = torch.autograd.grad(out.sum(), query, create_graph=True)
        return torch.autograd.grad(first.square().sum(), query)[0]

    found = second(own, layout=layout, method="heads")
    assert torch.allclose(found, layout.shard(second(whole), -2), atol=1e-12)
    text = raised(regard.UnsupportedError, lambda: second(own, layout=layout))
    assert "no second one (create_graph=True" in text, text


def gradients_of_several_outputs_at_once_are_refused(size):
    layout = Layout(9)
    _, own = small(layout, Hq=size, Hkv=size)
    leaves = [leaf(x) for x in own]
    for call in (
        lambda: attention(*leaves, layout=layout),
        lambda: attention(*leaves, layout=layout, method="heads"),
        lambda: layout.gather(leaves[0], -2),
    ):
        out = call()
        several = torch.ones(2, *out.shape, dtype=out.dtype)

        def ask(out=out, several=several):
            torch.autograd.grad(out, leaves[0], several, is_grads_batched=True)

        text = raised(regard.UnsupportedError, ask)
        assert "gradients of several outputs at once" in text, text
        call().sum().backward()  # the group goes on
    assert torch.isfinite(leaves[0].grad).all()


def only_keys_that_are_seen_are_sent(size):
    layout = Layout(4096, None, "contiguous")
    _, (q, k, v) = small(layout, dtype=torch.float32)
    sent, exchange = [], layout.peers.exchange

    def counted(what, sends, receives):
        sent.extend(x.nbytes for _, x in sends if x.is_floating_point())
        return exchange(what, sends, receives)

    layout.peers.exchange = counted
    attention(q, k, v, layout=layout, causal=True, window=(63, None))
    assert sum(sent) == (63 * (4 + 3) * 4 if layout.rank < size - 1 else 0)


def resident(name):
    """Bytes of this process: its ``VmRSS``, or its ``VmHWM``, the largest since the last reset."""
    return 1024 * int(Path("/proc/self/status").read_text().partition(f"{name}:")[2].split()[0])


def a_rank_takes_the_memory_of_its_tokens_and_of_two_buffers(size):
    """Striped, so that every rank sees the keys of all, in a window, so that there is little to do.

    Where the system tells the largest memory since a moment: on Linux.
    """
    reset, options = Path("/proc/self/clear_refs"), {"causal": True, "window": (63, None)}
    if not reset.exists():
        return
    few, layout = (Layout(length, None, "striped") for length in (64, 2**17))
    attention(*(torch.ones(1, few.count, 64),) * 3, layout=few, **options)  # what is loaded once
    reset.write_text("5")
    before = resident("VmRSS")
    own = [torch.randn(1, layout.count, 64) for _ in range(3)]
    arriving, exchange = [], layout.peers.exchange

    def counted(what, sends, receives):
        arriving.append(sum(x.nbytes for _, x in receives))
        return exchange(what, sends, receives)

    layout.peers.exchange = counted
    out = attention(*own, layout=layout, **options)
    taken = resident("VmHWM") - before
    buffer = own[1].nbytes + own[2].nbytes
    assert 0.99 * buffer < max(arriving) <= buffer, "keys and values of one rank at a time"
    allowed = 1.1 * (sum(x.nbytes for x in (*own, out)) + 2 * buffer)
    assert taken < allowed, f"{taken / 1e6:.0f} MB, and {allowed / 1e6:.0f} are allowed"


def heads_that_cannot_be_shared_out_are_told(size):
    layout = Layout(9)
    _, (q, k, v) = small(layout, Hq=2 * size, Hkv=size)
    text = raised(
        regard.UnsupportedError,
        lambda: attention(q, k, v, layout=layout, method="heads", dropout=0.5),
    )
    assert "method='heads' has no dropout" in text, text
    found = [attention(q, k, v, layout=layout, method="heads", **o) for o in ({}, {"dropout": 0.0})]
    assert torch.equal(*found)
    if size > 1:
        _, (q, k, v) = small(layout, Hq=3, Hkv=1)
        text = raised(
            regard.UnsupportedError, lambda: attention(q, k, v, layout=layout, method="heads")
        )
        assert "3 query heads and 1 key head; method='ring'" in text, text


def a_bias_of_keys_goes_with_the_heads(size):
    layout = Layout(13)
    whole, (q, k, v) = small(layout, Hq=size, Hkv=size)
    bias = torch.arange(13.0 * size, dtype=torch.float64).reshape(size, 1, 13).sin()
    out = attention(q, k, v, layout=layout, method="heads", bias=bias)
    one = regard.attention(*whole, bias=bias)
    assert torch.allclose(layout.gather(out, -2), one, atol=1e-14)


def a_bias_may_be_shared_by_several_axes_of_the_batch(size):
    layout = Layout(7)
    whole, own = ([x.expand(2, 2, *x.shape) for x in arrays] for arrays in small(layout))
    bias = torch.arange(14.0, dtype=torch.float64).reshape(1, 1, 2, 1, 7).sin()
    found, one = leaf(bias), leaf(bias)
    attention(*own, layout=layout, bias=found).square().sum().backward()
    regard.attention(*whole, bias=one).square().sum().backward()
    assert torch.allclose(sum(layout.peers.all_gather("test", found.grad)), one.grad, atol=1e-12)


def a_batch_of_no_element_has_weights(size):
    layout = Layout(33)
    _, own = small(layout)
    none = [x.expand(0, *x.shape) for x in own]
    out, weights = attention(*none, layout=layout, return_weights=True)
    assert out.shape == (0, 2, layout.count, 3)
    found = weights.summary(topk=2, strongest=3, pool=(3, 4))
    assert found.pooled.shape == (0, 2, 3, 4)
    assert found.strongest.weight.shape == (0, 2, 3)
    assert weights.row(9).shape == (0, 2, 33)


def dtensors_by_batch_or_heads_work(size):
    """One mesh dimension for heads, of one rank, beside that of the sequence."""
    mesh = init_device_mesh("cpu", (1, size), mesh_dim_names=("tp", "cp"))
    layout = Layout(12, mesh["cp"])
    whole, own = small(layout)
    one = layout.shard(regard.attention(*whole, causal=True), -2)

    def placed(*placements):
        return [DTensor.from_local(x, mesh["tp"], [p]) for x, p in zip(own, placements)]

    for placement in (Shard(0), Replicate()):
        shards = [x.detach().requires_grad_() for x in placed(*[placement] * 3)]
        out = attention(*shards, layout=layout, causal=True)
        assert isinstance(out, DTensor)
        assert out.placements == (placement,)
        assert torch.allclose(out.to_local(), one, atol=1e-14)
        (grad,) = torch.autograd.grad(out.to_local().sum(), shards[:1])
        assert isinstance(grad, DTensor)
    for kind, said, placements, options in (
        (regard.UnsupportedError, "Tokens are where the layout", [Shard(1)] * 3, {}),
        (regard.UnsupportedError, "the placement P", [Partial()] * 3, {}),
        (TypeError, "query is a DTensor of", [Shard(0), Replicate(), Shard(0)], {}),
        (regard.UnsupportedError, "sinks is given", [Shard(0)] * 3, {"sinks": torch.ones(2)}),
    ):
        arrays = placed(*placements)
        text = raised(kind, lambda x=arrays, o=options: attention(*x, layout=layout, **o))
        assert said in text, text
    text = raised(TypeError, lambda: attention(placed(Shard(0))[0], *own[1:], layout=layout))
    assert "key a Tensor" in text, text
    if size > 1 and layout.rank == 0:  # an error of one is told to all
        text = raised(TypeError, lambda: attention(placed(Shard(0))[0], *own[1:], layout=layout))
    elif size > 1:
        text = raised(RankError, lambda: attention(*own, layout=layout))
        assert "rank 0 refused the call: TypeError" in text, text


def dtensors_are_refused_by_what_has_no_layout(size):
    mesh = init_device_mesh("cpu", (size,))
    plain = torch.ones(size, 3, 4)
    for placement in (Shard(0), Shard(1), Replicate()):
        x = DTensor.from_local(plain, mesh, [placement])
        told = f"query is a DTensor of ('{placement}',); plain tensors are needed"
        for backend, call in itertools.product(
            ("auto", "kernel", "torch", "reference"),
            (
                lambda y, **how: regard.attention(y, y, y, **how),
                lambda y, **how: regard.attention(y, y, y, return_weights=True, **how),
                lambda y, **how: regard.AttentionWeights(y, y, **how).summary(),
                lambda y, **how: regard.attention_gradients(y, y, y, y, None, y, **how),
            ),
        ):
            text = raised(regard.UnsupportedError, functools.partial(call, x, backend=backend))
            assert told in text, text
            assert "query.to_local()" in text, text
            assert "regard.distributed.attention" in text, text
    for call in (
        lambda: regard.scaled_dot_product_attention(x, x, x),
        lambda: regard.attention(plain, x, plain),
        lambda: regard.attention(plain, plain, plain, mask=x.bool()),
        lambda: regard.attention(plain, plain, plain, bias=x),
        lambda: regard.attention(plain, plain, plain, sinks=x[:, 0, 0]),
        lambda: regard.steps(x, x, x),
    ):
        assert "is a DTensor of ('R',)" in raised(regard.UnsupportedError, call)


def large_runs_are_sent_as_they_are(size):
    from regard.distributed import _visits

    small_, _visits.LARGE = _visits.LARGE, 1
    try:
        compare("causal window", "zigzag")
    finally:
        _visits.LARGE = small_


def one_matrix_without_heads(size):
    layout = Layout(11, None, "striped")
    (q, k, v), _ = small(layout, Hq=1)
    whole = [x[0] for x in (q, k, v)]
    own = [layout.shard(x, 0) for x in whole]
    out, weights = attention(*own, layout=layout, causal=True, return_weights=True)
    one, exact = regard.attention(*whole, causal=True, return_weights=True)
    assert torch.allclose(out, layout.shard(one, 0), atol=1e-14)
    assert weights.shape == (11, 11)
    assert torch.allclose(weights.row(4), exact[4], atol=1e-14)
    assert torch.allclose(weights.pool((3, 3)), exact.pool((3, 3)), atol=1e-13, equal_nan=True)
    assert torch.allclose(weights.received(), layout.shard(exact.received(), 0), atol=1e-13)


class GroupWithoutStore:
    """Rank 0 kept the store, and has ended."""

    def get_group_store(self):
        raise RuntimeError("connection closed")


def a_rank_without_the_store_says_that_another_may_have_ended_first(size):
    layout = Layout(9)
    layout.peers.group = GroupWithoutStore()
    text = str(layout.peers.failed("attention", size - 1, RuntimeError("closed")))
    assert f"rank {size - 1} of {size} did not answer rank {layout.rank}" in text, text
    assert ("another rank may have ended first; torchrun" in text) == (size > 2), text


CHECKS = (
    layouts_cut_and_join,
    layouts_join_complex_numbers,
    zigzag_is_the_order_of_torchs_load_balancer,
    layouts_refuse,
    a_call_that_every_rank_gets_wrong_is_told_in_its_own_words,
    weights_refuse,
    an_output_has_the_dtype_that_is_asked_for_in_any_form,
    a_limit_refuses_before_anything_is_sent,
    options_that_are_written_to_are_told,
    a_rank_may_ask_for_fewer_gradients_than_the_others,
    a_rank_may_ask_for_fewer_second_gradients_than_the_others,
    a_compiled_model_computes_it_between_its_graphs,
    a_graph_or_a_transform_is_refused_and_the_group_goes_on,
    every_method_gives_its_part_of_the_summary,
    a_row_of_large_scores_has_the_sum_of_one_process,
    dropout_without_a_seed_is_the_same_on_every_rank,
    a_second_gradient_is_that_of_one_process_or_refused,
    gradients_of_several_outputs_at_once_are_refused,
    only_keys_that_are_seen_are_sent,
    one_matrix_without_heads,
    large_runs_are_sent_as_they_are,
    heads_that_cannot_be_shared_out_are_told,
    a_bias_of_keys_goes_with_the_heads,
    a_bias_may_be_shared_by_several_axes_of_the_batch,
    a_batch_of_no_element_has_weights,
    keys_receive_from_the_queries_that_see_them,
    a_rank_with_one_query_has_a_row_of_the_bias_or_one_of_all,
    dtensors_by_batch_or_heads_work,
    dtensors_are_refused_by_what_has_no_layout,
)
OF_SEVERAL = (
    a_rank_without_the_store_says_that_another_may_have_ended_first,
    a_rank_that_disagrees_is_named_on_every_rank,
    a_gradient_that_one_rank_cannot_give_is_told_by_every_other,
    a_gradient_of_heads_that_one_rank_cannot_give_is_told_by_every_other,
    gradients_of_different_calls_are_told,
)
OF_FOUR = (
    a_row_of_large_scores_has_the_sum_of_one_process,
    a_rank_takes_the_memory_of_its_tokens_and_of_two_buffers,
    a_rank_without_the_store_says_that_another_may_have_ended_first,
    layouts_cut_and_join,
    zigzag_is_the_order_of_torchs_load_balancer,
    a_rank_with_one_query_has_a_row_of_the_bias_or_one_of_all,
    only_keys_that_are_seen_are_sent,
    one_matrix_without_heads,
    a_rank_that_disagrees_is_named_on_every_rank,
)


def of_size(size):
    """By name the cases that a group of that size runs."""
    checks = OF_FOUR if size == 4 else CHECKS + (OF_SEVERAL if size > 1 else ())
    named = {check.__name__: functools.partial(check, size) for check in checks}
    return comparisons(size) | named


def prepare():
    """Computes what is expected, and loads what DTensors do, once, before the ranks are forked."""
    importlib.import_module("torch._dynamo")
    for case in (comparisons(1) | comparisons(2) | comparisons(4)).values():
        name, _, dtype = case.args
        expected(name, dtype, case.keywords.get("length", T))
    expected("large scores", "float32", T)


def example():
    """The program of the docs."""
    page = Path(__file__).parent.parent / "docs" / "distributed.md"
    return page.read_text(encoding="utf-8").partition("```python\n")[2].partition("```")[0]


def the_example_of_the_docs():
    """Runs it with what torchrun tells a process."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(example(), {"__name__": "__main__"})
    told = printed.getvalue()
    assert ("the same as one process" in told) == (os.environ["RANK"] == "0"), told


def _until_killed(layout, shards, dying):
    """Calls again and again; one rank ends without a word."""
    for n in range(9):
        if layout.rank == dying and n == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        attention(*shards, layout=layout)
    raise AssertionError("nobody died")


def a_rank_that_dies_is_named_by_every_other(size):
    """Told in the error that each of the others gets; the group is of no use after it."""
    layout = Layout(64)
    shards, dying = small(layout)[1], DYING[size]
    text = raised(RankError, lambda: _until_killed(layout, shards, dying))
    assert f"rank {dying} of {size} did not answer" in text, text


def a_rank_that_is_late_is_named_within_the_timeout(size):
    layout = Layout(64, torch.distributed.new_group(timeout=timedelta(seconds=2)))
    shards = small(layout)[1]
    if layout.rank == 1:  # it never comes
        return
    text = raised(RankError, lambda: attention(*shards, layout=layout))
    assert f"rank 1 of {size} did not answer" in text, text


def each_rank_waits_for_the_one_before(dying):
    """So that most learn of the death by one that has ended for it."""
    peers, x = Layout(64).peers, torch.zeros(4)
    peers.all_gather("test", x)
    if peers.rank == dying:
        os.kill(os.getpid(), signal.SIGKILL)
    one_before = (peers.rank - 1) % peers.size
    text = raised(RankError, lambda: peers.exchange("test", [], [(one_before, x)]).wait())
    assert f"rank {dying} of {peers.size} did not answer" in text, text


DYING = {2: 0, 4: 2}
CHAIN, CHAIN_SIZE = (0, 1, 2), 3


def in_a_chain(dying):
    case = functools.partial(each_rank_waits_for_the_one_before, dying)
    return {f"{dying} dies in a chain": case}


def at_the_beginning(size):
    """Cases that make a group of their own."""
    return {"example": the_example_of_the_docs} if size == 2 else {}


def at_the_end(size):
    """Cases after which the group is of no use."""
    late = {"late": functools.partial(a_rank_that_is_late_is_named_within_the_timeout, size)}
    dies = {"dies": functools.partial(a_rank_that_dies_is_named_by_every_other, size)}
    return (late if size == 2 else {}) | (dies if size > 1 else {})


if __name__ == "__main__":
    import ranks

    size, *words = sys.argv[1:]
    prepare()
    cases = of_size(int(size))
    cases = {name: x for name, x in cases.items() if all(word in name for word in words)}
    for name, errors in ranks.run(int(size), cases).items():
        print(name, "ok" if not any(errors) else "FAILED")
        for error in dict.fromkeys(errors):
            if error:
                print(error)
