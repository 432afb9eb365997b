"""The gradient of every step of a small attention, equal to torch's autograd of the formula."""

import html
import re

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

import regard
from definition import edit_logs, visible_pairs
from plain_formula import Errors, differentiate, to_array
from regard._base import tables
from regard._showing.gradients import NAMES
from regard.recording import Layer, Recording
from small import OPTIONS, WORDS, numbers, qkv
from strategies import calls, to_torch

EVERY = {**OPTIONS, "dropout": 0.4}
LEARNED = ("bias", "sinks")


def leaf(x):
    return torch.tensor(np.array(x), dtype=torch.float64, requires_grad=True)


def formula(
    q, k, v, bias=None, sinks=None, scale=None, softcap=None, dropout=0.0, seed=None, **rules
):
    """Every step of ``(B, H, L, D)`` tensors, on whole matrices, for autograd to differentiate."""
    B, Hq, Lq, D = q.shape
    Lk = k.shape[2]
    k, v = (x.expand(B, -1, -1, -1).repeat_interleave(Hq // k.shape[1], 1) for x in (k, v))
    scores = q @ k.mT
    scaled = scores * (D**-0.5 if scale is None else scale)
    capped = scaled * 1 if softcap is None else softcap * torch.tanh(scaled / softcap)
    masked = capped * 1 if bias is None else capped + bias
    if "edits" in rules:
        masked = masked + torch.from_numpy(edit_logs(rules["edits"], Hq, Lq, Lk))
    visible = torch.from_numpy(visible_pairs(B, Hq, Lq, Lk, **rules))
    e = torch.where(visible, torch.exp(masked), 0.0)
    total = e.sum(-1, keepdim=True)
    if sinks is not None:
        total = torch.where(total > 0, total + torch.exp(sinks[:, None, None]), 0.0)
    weights = e / torch.where(total > 0, total, 1.0)
    dropped = weights * 1
    if dropout:  # what is kept shows where the values are the unit vectors
        one_hot = torch.eye(Lk, dtype=torch.float64).expand(B, Hq, Lk, Lk)
        zeros = (torch.zeros(B, Hq, n, 1, dtype=torch.float64) for n in (Lq, Lk))
        dropped = weights * regard.attention(*zeros, one_hot, dropout=dropout, seed=seed) * Lk
    return {
        "scores": scores, "scaled": scaled, "capped": capped, "masked": masked, "weights": weights,
        "dropped": dropped, "output": dropped @ v,
    }  # fmt: skip


def in_four_axes(x, leading):
    if x.ndim < 4:
        return x[(None,) * (4 - x.ndim)]
    return x.expand(*leading, *x.shape[-3:]).flatten(0, -4)


def by_autograd(leaves, q, k, v, grad, options):
    """Gradients of ``formula`` by the names of ``StepsGradients``; zeros where nothing depends."""
    leading = q.shape[:-3]
    options = {**options, **{n: x for n, x in leaves.items() if n in LEARNED}}
    found = formula(*(in_four_axes(x, leading) for x in (q, k, v)), **options)
    named = {"query": q, "key": k, "value": v, **found, **leaves}
    gradients = torch.autograd.grad(
        found["output"], [*named.values()], grad.reshape(found["output"].shape), allow_unused=True
    )
    return {
        f"d_{name}": torch.zeros_like(x) if gradient is None else gradient
        for (name, x), gradient in zip(named.items(), gradients)
    }


def assert_all(gradients, expected, steps):
    """Each in the shape of its step, within 1e-12 of the largest number."""
    given_ = {n.removeprefix("d_") for n in NAMES if getattr(gradients, n) is not None}
    assert {f"d_{name}" for name in given_} == expected.keys() - (
        {"d_dropped"} if steps.dropped is None else set()
    )
    for name in given_:
        actual, exact = getattr(gradients, f"d_{name}"), expected[f"d_{name}"].detach().numpy()
        shape = exact.shape if getattr(steps, name, None) is None else getattr(steps, name).shape
        assert tuple(actual.shape) == tuple(shape), name
        bound = 1e-12 * max(1.0, np.abs(exact).max(initial=0.0))
        np.testing.assert_allclose(
            np.asarray(actual).ravel(), exact.ravel(), rtol=0, atol=bound, err_msg=name
        )


def check(arrays, options, is_torch):
    """Steps of query, key and value, forward and back, against autograd."""
    leaves = {n: leaf(options[n]) for n in LEARNED if n in options}
    q, k, v = map(leaf, arrays)
    grad = numbers(*q.shape[:-1], v.shape[-1], seed=9)
    expected = by_autograd(leaves, q, k, v, torch.from_numpy(grad), options)
    if is_torch:
        arrays, grad = [torch.from_numpy(x.copy()) for x in arrays], torch.from_numpy(grad)
        options = to_torch(options)
    steps = regard.steps(*arrays, **options)
    gradients = steps.backward(grad)
    assert isinstance(gradients.d_query, torch.Tensor) == is_torch
    assert_all(gradients, expected, steps)


@settings(deadline=None, max_examples=40)
@given(calls(), st.booleans(), st.booleans())
def test_all_options_together_equal_autograd(call, is_dropped, is_torch):
    arrays, options = call
    check(arrays, {**options, **({"dropout": 0.4, "seed": 5} if is_dropped else {})}, is_torch)


@pytest.mark.parametrize("is_torch", [False, True])
@pytest.mark.parametrize("option", EVERY)
def test_each_option_alone_equals_autograd(option, is_torch):
    seed = {"seed": 3} if option == "dropout" else {}
    check(qkv(), {option: EVERY[option]} | seed, is_torch)


@pytest.mark.parametrize("shared", [(1, 1), (1, 3), (2, 3)])
def test_leading_axes_stay_and_shared_ones_are_summed(shared):
    q, k = numbers(2, 3, 4, 5, 2), numbers(*shared, 2, 7, 2, seed=1)
    v = numbers(1, 3, 2, 7, 3, seed=2) if shared == (1, 3) else numbers(*shared, 2, 7, 3, seed=2)
    check((q, k, v), {"causal": True, "sinks": numbers(4)}, False)


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("bias", [(5,), (1, 5), (3, 1), (3, 5)])
def test_one_matrix_without_heads_has_its_bias_and_sink(shape, bias):
    q, k, v = (x[0] for x in qkv())
    options = {"bias": numbers(*bias), "sinks": numbers(1, seed=4).reshape(shape)}
    leaves = {"bias": leaf(options["bias"]), "sinks": leaf(options["sinks"].reshape(1))}
    exact = by_autograd(leaves, *map(leaf, (q, k, v)), torch.ones(3, 2).double(), {"causal": True})
    gradients = regard.steps(q, k, v, causal=True, **options).backward(np.ones((3, 2)))
    assert gradients.d_bias.shape == bias
    assert gradients.d_sinks.shape == shape
    np.testing.assert_allclose(gradients.d_bias, exact["d_bias"], atol=1e-13)
    np.testing.assert_allclose(gradients.d_sinks.reshape(1), exact["d_sinks"], atol=1e-13)


# From inputs.


def projections(*given_, d_in=3, heads=()):
    sizes = {"query": 5, "key": 5, "value": 2}
    found = {f"w_{n}": numbers(*heads, d_in, sizes[n], seed=7) for n in sizes if f"w_{n}" in given_}
    return found | {
        f"b_{n}": numbers(*heads, sizes[n], seed=8) for n in sizes if f"b_{n}" in given_
    }


W, B = ("w_query", "w_key", "w_value"), ("b_query", "b_key", "b_value")
INPUTS = {
    "none": ((4, 3), None, {}),
    "matrices": ((4, 3), None, projections(*W)),
    "all": ((4, 3), None, projections(*W, *B)),
    "context": ((4, 3), (6, 3), projections(*W, *B)),
    "some": ((4, 5), (6, 5), projections("w_value", "b_value", "b_query", d_in=5)),
    "one": ((3,), (6, 3), projections(*W, *B)),
    "one alone": ((3,), None, projections(*W)),
    "one with heads": ((3,), (6, 3), projections(*W, *B, heads=(2,))),
    "heads": ((2, 4, 3), None, projections(*W, *B, heads=(2,))),
    "shared key": (
        (2, 4, 3),
        (2, 6, 3),
        projections("w_query", "b_query", heads=(2,)) | projections("w_key", "b_key", "w_value"),
    ),
    "inputs as heads": ((2, 4, 3), None, projections(*W, *B)),
    "shared context": ((2, 4, 3), (1, 6, 3), projections(*W, *B)),
    "a bias for all heads": ((4, 3), None, projections(*W, heads=(2,)) | projections(*B)),
    "empty": ((0, 3), None, projections(*W, *B)),
    "empty context": ((4, 3), (0, 3), projections(*W, *B)),
}  # fmt: skip


def project(x, w, b):
    x = x * 1 if w is None else x @ w
    return x if b is None else x + (b[:, None] if b.ndim == 2 else b)


@pytest.mark.parametrize("is_torch", [False, True])
@pytest.mark.parametrize("given_", INPUTS.values(), ids=INPUTS)
def test_gradients_of_projections_and_inputs_equal_autograd(given_, is_torch):
    shape, context, arrays = given_
    arrays = {"x": numbers(*shape), **arrays}
    if context is not None:
        arrays["context"] = numbers(*context, seed=1)
    leaves = {"inputs" if n == "x" else n: leaf(x) for n, x in arrays.items()}
    x = leaves["inputs"] if len(shape) > 1 else leaves["inputs"][None]
    y = leaves.get("context", x)
    if any(x.ndim == 3 for n, x in arrays.items() if n[:2] == "w_"):
        x, y = x[..., None, :, :], y[..., None, :, :]
    q, k, v = (
        project(z, leaves.get(f"w_{n}"), leaves.get(f"b_{n}"))
        for z, n in ((x, "query"), (y, "key"), (y, "value"))
    )
    grad = numbers(*q.shape[:-1], v.shape[-1], seed=3)
    expected = by_autograd(leaves, q, k, v, torch.from_numpy(grad), {"causal": True})
    grad = grad[..., 0, :] if len(shape) == 1 else grad
    if is_torch:
        arrays, grad = to_torch(arrays), torch.from_numpy(grad)
    steps = regard.Steps.from_inputs(**arrays, causal=True)
    gradients = steps.backward(grad)
    assert_all(gradients, expected, steps)
    for name in W + B:
        if name in arrays:
            assert getattr(gradients, f"d_{name}").shape == arrays[name].shape


# Numbers that are hidden, missing or none.


def test_a_query_that_sees_nothing_gets_0_even_where_its_gradient_is_nan():
    q, k, v = qkv()
    options = {"mask": np.array([[0] * 5, [1] * 5, [1] * 5], bool), "sinks": numbers(4)}
    grad = np.ones((4, 3, 2))
    grad[:, 0] = np.nan
    found = regard.steps(q, k, v, **options, bias=np.zeros((3, 5))).backward(grad)
    for name in ("d_masked", "d_scaled", "d_scores", "d_query", "d_bias"):
        x = getattr(found, name)
        assert not x[..., 0, :].any(), name
        assert x[..., 1:, :].any(), name
    for name in ("d_key", "d_value", "d_sinks"):
        assert np.isfinite(getattr(found, name)).all(), name
    additive = np.zeros((3, 5))
    additive[0] = -np.inf
    again = regard.steps(q, k, v, bias=additive, sinks=options["sinks"]).backward(grad)
    for name in ("d_query", "d_key", "d_value", "d_sinks"):
        np.testing.assert_allclose(getattr(again, name), getattr(found, name), atol=1e-14)


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0, "sinks": numbers(4)}])
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_what_is_hidden_reaches_no_gradient_but_that_of_its_weight(poison, options):
    q, k, v = qkv()
    grad = numbers(4, 3, 2)
    clean = regard.steps(q, k, v, key_lengths=4, **options).backward(grad)
    k[:, 4], v[:, 4] = poison, -poison
    dirty = regard.steps(q, k, v, key_lengths=4, **options).backward(grad)
    for name in ("d_masked", "d_scaled", "d_scores", "d_query", "d_key", "d_value"):
        np.testing.assert_array_equal(getattr(dirty, name), getattr(clean, name), err_msg=name)
    assert not np.isfinite(dirty.d_weights[..., 4]).any()
    assert not dirty.d_key[:, 4].any()


def test_a_gradient_that_is_nan_stays_with_what_its_query_sees():
    q, k, v = qkv()
    grad = numbers(4, 3, 2)
    clean = regard.steps(q, k, v, causal=True).backward(grad)
    grad[:, 0] = np.nan  # query 0 sees keys 0 to 2
    dirty = regard.steps(q, k, v, causal=True).backward(grad)
    np.testing.assert_array_equal(dirty.d_query[:, 1:], clean.d_query[:, 1:])
    for name in ("d_key", "d_value"):
        np.testing.assert_array_equal(getattr(dirty, name)[:, 3:], getattr(clean, name)[:, 3:])
        assert np.isnan(getattr(dirty, name)[:, :3]).all()
    assert np.isnan(dirty.d_query[:, 0]).all()


def test_nan_in_a_visible_place_reaches_the_gradients():
    q, k, v = qkv()
    v[0, 2] = np.nan
    found = regard.steps(q, k, v, causal=True).backward(np.ones((4, 3, 2)))
    sees = np.tri(3, 5, 2, dtype=bool)[:, 2]
    assert np.isnan(found.d_query[:2]).all(-1)[:, sees].all()
    assert np.isfinite(found.d_query[2:]).all()


def test_scores_of_any_size_give_a_gradient():
    q, k, v = qkv()
    found = regard.steps(q * 1e150, k * 1e150, v).backward(np.ones((4, 3, 2)))
    np.testing.assert_allclose(found.d_masked, 0, atol=1e-300)
    assert found.d_value.sum() == pytest.approx(4 * 3 * 2)


@pytest.mark.parametrize(("Lq", "Lk"), [(0, 3), (3, 0), (0, 0)])
def test_nothing_to_attend_with_or_to_has_gradients_too(Lq, Lk):
    arrays = qkv(Lq=Lq, Lk=Lk)
    bias = numbers(4, Lq, Lk)
    found = regard.steps(*arrays, causal=True, bias=bias).backward(np.ones((4, Lq, 2)))
    for name, x in zip(("query", "key", "value", "bias"), (*arrays, bias)):
        assert getattr(found, f"d_{name}").shape == x.shape
        assert not getattr(found, f"d_{name}").any()
    assert str(found)
    assert found._repr_html_()
    batch = [x[None][:0] for x in arrays]
    assert regard.steps(*batch).backward(np.ones((0, 4, Lq, 2))).d_key.shape == (0, 2, Lk, 6)


# Types.


DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]


def converted(arrays, dtype, is_torch):
    """Float64 arrays in a dtype of a library, and as they are then in float64."""
    narrow = [x.astype(dtype) for x in arrays]
    wide = [x.astype(np.float64) for x in narrow]
    if is_torch:
        name = getattr(torch, np.dtype(dtype).name)
        narrow = [torch.from_numpy(x).to(name) for x in wide]
    return narrow, wide


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_torch", [False, True])
def test_gradients_have_the_dtypes_of_their_steps_and_follow_from_those_on_the_page(
    dtype, is_torch
):
    arrays = {"x": numbers(4, 3), **projections(*W, *B)}
    (*narrow, grad), (x, *_) = converted([*arrays.values(), numbers(4, 2)], dtype, is_torch)
    options = {"bias": numbers(4, 4), "sinks": numbers(1)}
    options = to_torch(options) if is_torch else options
    found = regard.Steps.from_inputs(**dict(zip(arrays, narrow)), **options).backward(grad)
    of_matrices = "float64" if dtype is np.float64 else "float32"
    own = dict.fromkeys(NAMES, np.dtype(dtype).name) | dict.fromkeys(
        ("d_bias", "d_sinks"), "float64"
    )
    own |= dict.fromkeys(("d_weights", "d_masked", "d_capped", "d_scaled", "d_scores"), of_matrices)
    for name in NAMES:
        given_ = getattr(found, name)
        assert given_ is None or str(given_.dtype).removeprefix("torch.") == own[name], name
    for part in ("query", "key", "value"):
        d_part, d_w, d_b = (
            to_array(getattr(found, f"d_{n}{part}")).astype(float) for n in ("", "w_", "b_")
        )
        eps = float(ml_dtypes.finfo(dtype).eps)
        bound = eps * (abs(x).T @ abs(d_part))
        assert (abs(d_w - x.T @ d_part) <= bound).all()
        assert (abs(d_b - d_part.sum(0)) <= eps * abs(d_part).sum(0)).all()


@pytest.mark.parametrize("dtype", DTYPES[:3])
@pytest.mark.parametrize("is_torch", [False, True])
def test_gradients_of_narrow_dtypes_are_within_twice_the_plain_formulas_error(dtype, is_torch):
    errors = {name: Errors() for name in ("d_query", "d_key", "d_value")}
    for seed in range(12):
        arrays = [numbers(2, 17, n, seed=[seed, n]) for n in (8, 9, 10, 11)]
        arrays = [x[..., :8] for x in arrays]
        narrow, wide = converted(arrays, dtype, is_torch)
        found = regard.steps(*narrow[:3], causal=True).backward(narrow[3])
        visible = np.tri(17, dtype=bool)
        exact = differentiate(*wide, visible=visible)
        plain = differentiate(*(x.astype(dtype) for x in wide), visible=visible)
        for (name, error), *others in zip(errors.items(), exact, plain):
            error.add(getattr(found, name), *others)
    assert max(error.ratio for error in errors.values()) < 2


def test_tensors_that_learn_are_left_alone():
    q, k, v = (torch.from_numpy(x).requires_grad_() for x in qkv())
    sinks, grad = torch.nn.Parameter(torch.ones(4).double()), torch.ones(4, 3, 2).double()
    steps = regard.steps(q, k, v, sinks=sinks)
    found = steps.backward(grad.requires_grad_())
    for name in NAMES:
        x = getattr(found, name)
        assert x is None or (type(x) is torch.Tensor and not x.requires_grad), name
    assert all(x.grad is None for x in (q, k, v, sinks, grad))
    steps.output.backward(grad.detach())  # its graph is still there
    for name, x in (("d_query", q), ("d_key", k), ("d_value", v), ("d_sinks", sinks)):
        torch.testing.assert_close(getattr(found, name), x.grad, rtol=0, atol=1e-13)


@pytest.mark.parametrize("name", ["x", "context", "w_key", "b_value", "bias", "segments"])
def test_a_tensor_that_was_written_to_since_is_named(name):
    arrays = to_torch({**projections(*W, *B), "x": numbers(4, 3), "context": numbers(5, 3)})
    options = {"bias": torch.zeros(4, 5).double()}
    options["segments"] = torch.zeros(4, dtype=torch.int64), torch.zeros(5, dtype=torch.int64)
    steps = regard.Steps.from_inputs(**arrays, **options)
    grad = torch.ones(4, 2).double()
    gradients = steps.backward(grad)
    written = {**arrays, **options, "segments": options["segments"][1]}[name]
    written += 1
    for call, kind in (
        (lambda: steps.backward(grad), "backward"),
        (lambda: steps.explain(1, 0), "explain"),
        (lambda: gradients.explain(1, 0), "explain"),
    ):
        message = f"^{kind}: {name} was written to since .* Make the steps anew"
        with pytest.raises(RuntimeError, match=message):
            call()
    regard.Steps.from_inputs(**arrays, **options).backward(grad)


def test_a_second_call_gives_the_same_bits_and_is_linear_in_the_gradient():
    q, k, v = qkv()
    steps = regard.steps(q, k, v, causal=True, softcap=2.0, dropout=0.5)  # drawn once
    grad = numbers(4, 3, 2)
    first, second, twice = (steps.backward(x) for x in (grad, grad, 2 * grad))
    for name in NAMES:
        if getattr(first, name) is not None:
            np.testing.assert_array_equal(getattr(first, name), getattr(second, name))
            np.testing.assert_array_equal(getattr(twice, name), 2 * getattr(first, name))


def test_what_changes_no_gradient_is_the_same_array():
    q, k, v = qkv()
    found = regard.steps(q, k, v, causal=True, bias=OPTIONS["bias"]).backward(np.ones((4, 3, 2)))
    assert found.d_masked is found.d_capped is found.d_scaled
    capped = regard.steps(q, k, v, softcap=1.0).backward(np.ones((4, 3, 2)))
    assert capped.d_masked is capped.d_capped is not capped.d_scaled
    assert capped.d_dropped is capped.d_bias is capped.d_sinks is capped.d_inputs is None


def test_steps_of_a_recording_have_gradients():
    q, k, v = qkv(Lq=5, dtype=np.float32)
    recording = Recording(WORDS[:5], [Layer(q, k, v, causal=True, sinks=numbers(4))])
    found = recording.steps(0, 3).backward(np.ones((5, 2), np.float32))
    whole = regard.steps(q, k, v, causal=True, sinks=numbers(4))
    exact = whole.backward(np.ones((4, 5, 2), np.float32))
    np.testing.assert_allclose(found.d_scores, exact.d_scores[3], atol=1e-6)
    np.testing.assert_allclose(found.d_sinks, exact.d_sinks[3:], atol=1e-6)
    assert "journey" in str(found)


# What it says: the arithmetic of one cell.


def test_explain_writes_the_arithmetic_of_one_gradient():
    x = np.array([[1, 0], [0, 1], [1, 1]], np.float64)
    steps = regard.Steps.from_inputs(x, tokens=["one", "small", "step"], causal=True)
    found = steps.backward(np.array([[0, 0], [0, 0], [1.0, 0]]))
    assert found.explain(2, 0).split("\n") == [
        "query 2 'step', key 0 'one'",
        "d_weights  1*1 + 0*0 = 1",
        "row sum    0.24826*1 + 0.24826*0 + 0.50349*1 = 0.75174",
        "d_masked   0.24826 * (1 - 0.75174) = 0.061631: more of this weight would raise the loss,"
        " so a step of gradient descent lowers the score",
        "d_scores   0.061631 / sqrt(2) = 0.043579",
        "d_query    0.043579 * key 0 + -0.13196 * key 1 + 0.088384 * key 2 = [0.13196, -0.043579]",
        "d_key      0 * query 0 + 0 * query 1 + 0.043579 * query 2 = [0.043579, 0.043579]",
        "d_value    1 * d_output 0 + 0.33024 * d_output 1 + 0.24826 * d_output 2 = [0.24826, 0]",
    ]
    assert "d_masked   0.24826 * (0 - 0.75174) = -0.18662: more of this weight would lower the" in (
        found.explain(-1, -2)
    )
    assert found.explain(-1, -2).count("descent raises the score") == 1
    assert found.explain(0, 1).split("\n")[1:4] == [
        "d_weights  0*0 + 0*1 = 0",
        "d_masked   0: query 0 does not attend to key 1",
        "d_scores   0 / sqrt(2) = 0",
    ]
    assert found.explain(0, 0).split("\n")[3] == "d_masked   1 * (0 - 0) = 0"


def test_explain_is_right_about_the_cap_dropout_shared_heads_and_long_sums():
    q, k, v = (x[None].repeat(2, 0) for x in qkv(D=20, Lk=30, Dv=9))
    steps = regard.steps(q, k[:1], v, softcap=2.0, dropout=0.5, seed=3, scale=0.5)
    grad = numbers(2, 4, 3, 9)
    found = steps.backward(grad)
    kept = np.flatnonzero(steps.dropped[1, 3, 2])[0]
    lost = np.flatnonzero(steps.dropped[1, 3, 2] == 0)[0]
    lines = dict(x.split(maxsplit=1) for x in found.explain(2, kept, head=(1, 3)).split("\n")[1:])

    def cell(x):
        return f"{x[1, 3, 2, kept]:.5g}"

    assert lines["d_dropped"].count("*") == 5
    assert lines["d_dropped"].endswith(f"= {cell(found.d_dropped)}")
    assert lines["d_weights"] == f"{cell(found.d_dropped)} / 0.5 = {cell(found.d_weights)}"
    assert f"= {cell(found.d_capped)}" in lines["d_capped"]
    scaled, d_scaled = cell(steps.scaled), cell(found.d_scaled)
    assert lines["d_scaled"] == f"{cell(found.d_capped)} * (1 - tanh({scaled} / 2)**2) = {d_scaled}"
    assert lines["d_scores"] == f"{d_scaled} * 0.5 = {cell(found.d_scores)}"
    own = found.d_scores[1, 3, :, kept] @ q[1, 3]
    assert f"= [{own[0]:.5g}, {own[1]:.5g}, " in lines["d_key"]
    total = found.d_key[0, 1, kept]
    assert f", and with the 3 others that share the key = [{total[0]:.5g}, " in lines["d_key"]
    assert "and with the 1 other that shares the value = [" in lines["d_value"]
    lines = found.explain(2, lost, head=(1, 3)).split("\n")
    assert lines[2] == "d_weights  0: the weight was dropped"
    ahead = regard.steps(q, k, v, causal=True, dropout=0.5, seed=3, query_start=-1).backward(grad)
    first = [ahead.explain(0, j, head=(1, 3)).split("\n")[2] for j in range(30)]
    told = ["dropped" in line for line in first]
    assert told == (ahead.d_weights[1, 3, 0] == 0).tolist()
    assert 0 < sum(told) < 30


def test_explain_tells_of_nan_and_inf():
    q, k, v = (x[0] for x in qkv())
    v[1] = np.inf
    found = regard.steps(q, k, v, causal=True, window=(1, 0)).backward(np.ones((3, 2)))
    lines = found.explain(0, 1).split("\n")
    assert lines[1] == "d_weights  1*inf + 1*inf = inf"
    assert lines[3] == f"d_masked   {found.steps.weights[0, 1]:.5g} * (inf - inf) = nan"
    assert "nan" not in found.explain(2, 2)


def test_the_sign_of_a_gradient_says_how_the_loss_moves():
    """Raising one score a little, by a bias, moves the loss as ``explain`` says."""
    q, k, v = (x[0] for x in qkv())
    grad = numbers(3, 2, seed=6)
    found = regard.steps(q, k, v, sinks=np.ones(1)).backward(grad)
    loss = (grad * regard.attention(q, k, v, sinks=np.ones(1))).sum()
    for i, j in np.ndindex(3, 5):
        bias = np.zeros((3, 5))
        bias[i, j] = 1e-4
        moved = (grad * regard.attention(q, k, v, sinks=np.ones(1), bias=bias)).sum()
        verb = "raise" if moved > loss else "lower"
        assert f"more of this weight would {verb} the loss" in found.explain(i, j)


def test_one_query_has_gradients_without_a_length_axis():
    q, k, v = numbers(4), numbers(3, 4, seed=1), numbers(3, 2, seed=2)
    steps = regard.steps(q, k, v, tokens=["a", "b", "c"], query_tokens=["now"])
    found = steps.backward(np.ones(2))
    assert found.d_scores.shape == (3,)
    assert found.d_query.shape == (4,)
    whole = regard.steps(q[None], k, v).backward(np.ones((1, 2)))
    np.testing.assert_array_equal(found.d_query, whole.d_query[0])
    np.testing.assert_array_equal(found.d_key, whole.d_key)
    assert re.search(r"\n  now +-?\d", str(found))
    assert found.explain(0, 1).startswith("query 0 'now', key 1 'b'\n")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: s.explain(3, 0, head=0), "query 3; there are 3"),
        (lambda s: s.explain(0, -6, head=0), "key -6; there are 5"),
        (lambda s: s.explain(0, 0, head=4), "head 4; there are 4"),
        (lambda s: s.explain(0, 0), r"head \(\); one index is needed for each of .* \(4,\)"),
    ],
)
def test_explain_says_which_cells_there_are(call, message):
    with pytest.raises(IndexError, match=message):
        call(regard.steps(*qkv()).backward(np.ones((4, 3, 2))))


# What it says of all, and of what is no gradient.


X = numbers(4, 3)


@pytest.mark.parametrize(
    ("steps", "grad", "error", "message"),
    [
        (
            regard.steps(X, X, X),
            None,
            TypeError,
            r"grad_output is None; .* needed, NumPy float64 \(4, 3\), as steps.output. For the sum"
            r" of the output as the loss it is np.ones_like\(steps.output\)",
        ),
        (
            regard.steps(*map(torch.from_numpy, (X, X, X))),
            None,
            TypeError,
            r"torch float64 on cpu \(4, 3\), .* torch.ones_like\(steps.output\)",
        ),
        (regard.steps(X, X), X, ValueError, r"no value, .* regard.steps\(query, key, value\)"),
        (regard.steps(X, X, X), 1.0, TypeError, "grad_output is a builtins.float; an array is"),
        (
            regard.steps(X, X, X),
            np.ma.masked_array(X),
            TypeError,
            r"grad_output is a numpy.ma(.core)?.MaskedArray; an array is needed, NumPy float64",
        ),
        (
            regard.steps(X, X, X),
            torch.ones(4, 3).to_sparse(),
            TypeError,
            "grad_output is a torch.Tensor; an array is needed",
        ),
        (
            regard.steps(X, X, X),
            X.astype(np.float32),
            TypeError,
            "is NumPy float32 and the output NumPy float64; both must be of one library, dtype and"
            r" device. Convert it, as in np.asarray\(grad_output, 'float64'\)",
        ),
        (
            regard.steps(X, X, X),
            torch.from_numpy(X),
            TypeError,
            "is torch float64 on cpu and the output NumPy float64",
        ),
        (
            regard.steps(*map(torch.from_numpy, (X, X, X))),
            torch.ones(4, 3, device="meta"),
            TypeError,
            r"is torch float32 on meta .* in torch.as_tensor\(grad_output\).to\(steps.output\)",
        ),
        (
            regard.steps(X, X, X),
            X[:1],
            regard.ShapeError,
            r"shape \(1, 3\); \(4, 3\) is needed, one number for each of steps.output",
        ),
    ],
)
def test_what_is_no_gradient_of_the_output_is_said(steps, grad, error, message):
    with pytest.raises(error, match=message):
        steps.backward(grad)


def test_too_much_to_write_out_is_refused():
    steps = regard.steps(X, X, X)
    refused = pytest.raises(
        regard.MaterializeError, match=r"backward: .* \(3, 1, 1, 4, 4\) float64"
    )
    with regard.limits(weights_bytes=3 * 4 * 4 * 8 - 1), refused:
        steps.backward(X)
    with regard.limits(weights_bytes=3 * 4 * 4 * 8):
        steps.backward(X)


def headings(shown):
    return [line for line in str(shown).split("\n") if line and not line.startswith(" ")]


def test_the_printed_text_names_every_gradient_its_formula_and_shape():
    q, k, v = qkv()
    options = {
        "causal": True, "bias": OPTIONS["bias"][:1], "sinks": OPTIONS["sinks"], "softcap": 2.5,
        "dropout": 0.25, "seed": 1, "scale": 0.5,
    }  # fmt: skip
    found = regard.steps(q, k, v, **options).backward(np.ones((4, 3, 2)))
    assert headings(found) == [
        "d_output",
        "d_dropped = d_output @ value.T",
        "d_weights = d_dropped / 0.75 where the weight was kept, 0 where it was dropped",
        "d_masked = d_capped = weights * (d_weights - the sum of weights * d_weights in its row)",
        "d_scaled = d_capped * (1 - tanh(scaled / 2.5)**2)",
        "d_scores = d_scaled * 0.5",
        "d_query = d_scores @ key",
        "d_key = d_scores.T @ query, summed over the 2 heads that share it",
        "d_value = dropped.T @ d_output, summed over the 2 heads that share it",
        "d_bias = d_masked, summed where the bias is broadcast",
        "d_sinks = minus the sum, over the queries, of the sink's weight * the sum of weights *"
        " d_weights",
    ]
    assert str(found).count("shape (4, 3, 5)") == 5
    assert repr(found) == "StepsGradients(4 heads, 3 x 5, head size 6, causal)"
    assert str(found).isascii()


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, "d_scaled"),
        ({"causal": True}, "d_masked = d_scaled"),
        ({"softcap": 2.0}, "d_capped"),
        ({"softcap": 2.0, "causal": True}, "d_masked = d_capped"),
    ],
)
def test_a_gradient_has_the_names_of_the_steps_that_are_printed(options, names):
    steps = regard.steps(X, X, X, **options)
    found = steps.backward(X)
    (heading,) = (line for line in headings(found) if "its row" in line)
    assert heading.partition(" = weights")[0] == names
    assert ("d_bias" in str(found), "d_sinks" in str(found)) == (False, False)
    for name in names.split(" = "):
        assert any(line.startswith(f"{name[2:]} =") for line in headings(steps))
        assert f"{name[2:]} = " in str(steps)


def test_gradients_of_projections_are_printed_with_their_formulas():
    arrays = projections(*W, *B, heads=(2,)) | {"x": X, "context": numbers(5, 3)}
    tokens = {"tokens": WORDS[:5], "query_tokens": ["a", "b", "c", "d"]}
    steps = regard.Steps.from_inputs(**arrays, **tokens)
    lines = headings(steps.backward(np.ones((2, 4, 2))))
    assert lines[lines.index("d_value = weights.T @ d_output") + 1 :] == [
        "d_w_query = inputs.T @ d_query",
        "d_w_key = context.T @ d_key",
        "d_w_value = context.T @ d_value",
        "d_b_query = sum of the rows of d_query",
        "d_b_key = sum of the rows of d_key",
        "d_b_value = sum of the rows of d_value",
        "d_inputs = d_query @ w_query.T, summed over the heads",
        "d_context = d_key @ w_key.T + d_value @ w_value.T, summed over the heads",
    ]
    text = str(steps.backward(np.ones((2, 4, 2))))
    assert re.search(r"d_inputs = .*\n.*\n  a +-?\d", text)
    assert re.search(r"d_context = .*\n.*\n  Your +-?\d", text)
    assert re.search(r"d_scores = .*\n.*\n.*\n +Your +journey .*\n  a +-?\d", text)
    alone = regard.Steps.from_inputs(X, b_key=numbers(3)).backward(X)
    assert "d_inputs = d_query + d_key + d_value" in headings(alone)
    assert "d_b_key = sum of the rows of d_key" in headings(alone)


def test_html_and_terminal_show_the_same_numbers_and_grey_what_is_masked():
    found = regard.steps(X, X, X, causal=True, tokens=["<b>", "b", "c", "d"]).backward(X)
    page = found._repr_html_()
    assert "<b>d_masked = d_scaled</b> <code>= weights * (" in page
    assert html.escape("<b>") in page
    part = page[page.index("<b>d_scores</b>") : page.index("<b>d_query</b>")]
    cells = re.findall(r'<td style="([^"]*)">([^<]*)</td>', part)
    greys = [style.startswith(tables.INVISIBLE) for style, _ in cells]
    assert greys == (~np.tri(4, dtype=bool)).ravel().tolist()
    console = Console(width=100, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(found)
    for number in found.d_query.ravel():
        assert f"{number:.4f}" in capture.get()


def numbers_of(shown, name):
    """The numbers of a table of the printed text."""
    lines = str(shown).split("\n")
    start = next(n for n, line in enumerate(lines) if re.match(rf"(\w+ = )*{name}( =|$)", line))
    rows = [line.split()[1:] for line in lines[start + 2 : lines.index("", start)]]
    return np.array([[float(x) for x in row] for row in rows if row[0][-1].isdigit()])


def test_a_reader_finds_a_number_by_hand_from_the_printed_pages():
    """From the digits on the page alone, through every line of the backward pass."""
    words = ["one", "small", "step"]
    x, w_value = np.array([[1.0, 0], [0, 1], [1, 1]]), np.array([[1.0, 2], [0, 1]])
    steps = regard.Steps.from_inputs(x, tokens=words, causal=True, w_value=w_value)
    gradients = steps.backward(np.array([[0.0, 0.0], [1.0, 0.0], [0.5, -1.0]]))
    read = {n: numbers_of(steps, n) for n in ("query", "key", "value", "weights")}
    read |= {n: numbers_of(gradients, n) for n in NAMES if n in str(gradients)}
    weight = read["weights"][2]
    assert weight.tolist() == [0.2483, 0.2483, 0.5035]
    d_weight = [0.5 * v[0] - 1.0 * v[1] for v in read["value"]]
    assert d_weight == [-1.5, -1.0, -2.5] == read["d_weights"][2].tolist()
    row_sum = 0.2483 * -1.5 + 0.2483 * -1.0 + 0.5035 * -2.5
    d_masked = 0.2483 * (-1.5 - row_sum)
    assert d_masked == pytest.approx(read["d_masked"][2, 0], abs=2e-4)
    d_score = read["d_masked"][2, 0] / 2**0.5
    assert d_score == pytest.approx(read["d_scores"][2, 0], abs=1e-4)
    d_query = sum(read["d_scores"][2, j] * read["key"][j] for j in range(3))
    np.testing.assert_allclose(d_query, read["d_query"][2], atol=2e-4)
    d_key = sum(read["d_scores"][i, 0] * read["query"][i] for i in range(3))
    np.testing.assert_allclose(d_key, read["d_key"][0], atol=2e-4)
    d_value = sum(read["weights"][i, 0] * read["d_output"][i] for i in range(3))
    np.testing.assert_allclose(d_value, read["d_value"][0], atol=2e-4)
    np.testing.assert_allclose(x.T @ read["d_value"], read["d_w_value"], atol=3e-4)


def test_explain_keeps_terms_that_are_no_numbers():
    q, k = np.eye(2), np.array([[np.nan, 0.0], [0.0, 1.0]])
    found = regard.steps(q, k, np.eye(2), scale=1.0).backward(np.ones((2, 2)))
    lines = found.explain(0, 0).split("\n")
    assert lines[2] == "row sum    nan*1 + nan*1 = nan"
    assert "does not attend" not in found.explain(0, 0)
    assert lines[-2].startswith("d_key      nan * query 0 + nan * query 1 = ")
