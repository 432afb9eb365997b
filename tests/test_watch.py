"""regard.watch: what heads do while a model trains, and the first score that is not finite."""

import contextlib
import copy
import pickle
import threading
import warnings
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import regard
import regard.nn
from definition import define, edit_logs, visible_pairs
from regard import _backends
from regard.capture import NonFinite, WatchReport
from strategies import calls, to_torch

MEASURES = {"max_score", "entropy_mean", "entropy_min", "first_token", "distance"}


class Attention(nn.Module):
    """As nanoGPT's."""

    def __init__(self, width=16, heads=2, dropout=0.1):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv = nn.Linear(width, 3 * width)

    def forward(self, x):
        B, L, width = x.shape
        q, k, v = self.qkv(x).view(B, L, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        drop = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=drop)
        return y.transpose(1, 2).reshape(B, L, width)


class Model(nn.Module):
    """Blocks of attention, and a loss."""

    def __init__(self, blocks=2, heads=2, checkpoints=None):
        super().__init__()
        self.checkpoints = checkpoints
        self.blocks = nn.ModuleList([nn.Sequential(Attention(heads=heads)) for _ in range(blocks)])
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x):
        for block in self.blocks:
            if self.checkpoints is None:
                x = x + block(x)
            else:
                x = x + checkpoint(block, x, use_reentrant=self.checkpoints == "reentrant")
        return self.norm(x.mT).square().mean()


def batch(n=0, length=7):
    return torch.randn(2, length, 16, generator=torch.Generator().manual_seed(n))


def train(model, steps=5, first=0):
    """The losses of some steps of a training."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for n in range(first, first + steps):
        optimizer.zero_grad()
        loss = model(batch(n).requires_grad_())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


class Calls(nn.Module):
    """Attention of given arrays."""

    def __init__(self, *arrays, **options):
        super().__init__()
        self.arrays, self.options = arrays, options

    def forward(self):
        return regard.attention(*self.arrays, **self.options)


def call(model, times=1):
    """The model's outputs for one batch."""
    return [model(batch()) for _ in range(times)]


def seen_by(model, *inputs, **options):
    """The report of one step."""
    with regard.watch(model, **options) as watch:
        model(*inputs)
    assert (watch.steps, len(watch.history)) == (1, 1)
    return watch.last


def dense(q, k, **options):
    """Every measure by the plain formula in float64, over matrices and loops."""
    (B, Hq, Lq, D), Lk = q.shape, k.shape[2]
    w, _ = define(q, k, **options)
    told = {n: x for n, x in options.items() if n not in ("bias", "sinks", "scale", "softcap")}
    visible = visible_pairs(B, Hq, Lq, Lk, **told)
    scale, keys = options.get("scale", D**-0.5), np.broadcast_to(k, (B, *k.shape[1:]))
    s = q @ keys.repeat(Hq // k.shape[1], 1).swapaxes(-1, -2) * scale
    if cap := options.get("softcap"):
        s = cap * np.tanh(s / cap)
    s = s + options.get("bias", 0.0)
    if "edits" in options:
        s = s + edit_logs(options["edits"], Hq, Lq, Lk)
    lengths = np.broadcast_to(options.get("key_lengths", Lk), (B,))
    starts = np.broadcast_to(options.get("query_start", lengths - Lq), (B,))
    has_order = bool(options.get("causal")) or options.get("window", (None, None)) != (None, None)
    places = starts if has_order or Lq < Lk else 0 * starts  # of the first queries
    ends = Lk - visible.any(1)[..., ::-1].argmax(-1)
    at_own = (ends == places[:, None] + np.arange(Lq) + 1) & visible.any((1, 3))
    in_order = has_order or bool((at_own[:, 1:] & at_own[:, :-1]).any())
    is_cross = Lq > Lk or (1 < Lq < Lk and not in_order)
    is_token = np.ones((B, Lq), bool)  # of those that are not known to be padding
    if in_order and Lq <= Lk:
        for b in range(B):
            own = [(i, places[b] + i) for i in range(Lq) if 0 <= places[b] + i < Lk]
            seen = [(i, p) for i, p in own if visible[b, :, :, p].any()]
            if all(visible[b, :, i, p].any() for i, p in seen):
                is_token[b, [i for i, p in own if (i, p) not in seen]] = False
    found = {name: np.full((1, Hq), np.nan) for name in MEASURES}
    for h in range(Hq):
        largest, rows = [-np.inf], []
        for b, i in np.ndindex(B, Lq):
            p = starts[b] + i
            (seen,) = np.nonzero(visible[b, h, i])
            if not is_token[b, i] or not len(seen):
                continue
            largest.append(s[b, h, i, seen].max())
            if len(seen) > 1:
                row = w[b, h, i, seen]
                logs = np.log(np.where(row > 0, row, 1))
                rows.append((-(row * logs).sum(), row[0], (row * abs(p - seen)).sum()))
        found["max_score"][0, h] = max(largest)
        if rows:
            entropy, first, distance = np.array(rows).T
            found["entropy_mean"][0, h], found["entropy_min"][0, h] = entropy.mean(), entropy.min()
            found["first_token"][0, h] = first.mean()
            found["distance"][0, h] = np.nan if is_cross else distance.mean()
    return found


BACKENDS = [backend for backend in _backends.BACKENDS if backend.name not in ("fused", "triton")]


@settings(max_examples=40, deadline=None)
@given(calls(min_length=1), st.sampled_from(BACKENDS))
def test_every_measure_is_that_of_the_plain_formula(call, backend):
    (q, k, v), options = call
    with mock.patch.object(_backends, "BACKENDS", (backend,)):
        arrays = (torch.from_numpy(np.ascontiguousarray(x)) for x in (q, k, v))
        found = seen_by(Calls(*arrays, **to_torch(options)))
    assert {*found} == MEASURES
    assert found.nonfinite is None
    for name, exact in dense(q, k, **options).items():
        assert found[name].dtype == np.float64
        np.testing.assert_allclose(found[name], exact, rtol=1e-9, atol=1e-10, err_msg=name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_narrow_dtypes_are_measured_in_float32(dtype):
    q, k = (torch.randn(2, 3, 40, 8).to(getattr(torch, dtype)) for _ in range(2))
    found = seen_by(Calls(q, k, k, causal=True))
    for name, exact in dense(q.double().numpy(), k.double().numpy(), causal=True).items():
        np.testing.assert_allclose(found[name], exact, rtol=3e-6, err_msg=name)


@pytest.mark.parametrize("checkpoints", [None, "reentrant", "not"])
def test_no_number_of_the_training_changes(checkpoints):
    def run(**options):
        torch.manual_seed(1)
        model = Model(checkpoints=checkpoints)
        watching = regard.watch(model, **options) if options else contextlib.nullcontext()
        with watching as watch:
            losses = train(model)
        return losses, model.state_dict(), torch.get_rng_state(), watch

    plain, watched = run(), run(every=2)
    assert watched[0] == plain[0]
    assert all(torch.equal(x, watched[1][name]) for name, x in plain[1].items())
    assert torch.equal(watched[2], plain[2])
    assert watched[3].steps == 5  # what a checkpoint computes again is none
    assert [found.step for found in watched[3].history] == [0, 2, 4]
    assert watched[3].last["max_score"].shape == (2, 2)


def test_a_model_that_is_a_checkpoint_itself_is_counted_once():
    for reentrant in (True, False):
        model = Model()
        with regard.watch(model, every=1) as watch:
            checkpoint(model, batch().requires_grad_(), use_reentrant=reentrant).backward()
        assert (watch.steps, len(watch.history)) == (1, 1)


def test_a_step_is_a_call_in_training_mode():
    model, told = Model(), []
    with regard.watch(model, every=3, report=lambda step, found: told.append(step)) as watch:
        for n in range(7):
            model.train()(batch(n)).backward()
            model.eval()(batch(n))
    assert told == [0, 3, 6]
    assert watch.steps == 7
    with regard.watch(model, every=3, start=7, evaluation=True) as watch:
        for n in range(7):
            model(batch(n))
    assert [found.step for found in watch.history] == [9, 12]
    with watch:  # goes on
        for n in range(2):
            model(batch(n))
    assert [found.step for found in watch.history] == [9, 12, 15]


def test_report_gets_the_step_and_arrays_by_name_which_the_watch_keeps():
    told = []
    model = Model(3)
    with regard.watch(model, every=2, report=lambda *given: told.append(given)) as watch:
        assert watch.last is None
        train(model, 3)
    assert [(step, found) for step, found in told] == [(0, watch.history[0]), (2, watch.last)]
    assert all(type(found) is WatchReport for found in watch.history)
    assert {name: x.shape for name, x in watch.last.items()} == dict.fromkeys(MEASURES, (3, 2))
    assert watch.last.layers == {"": ("blocks.0.0", "blocks.1.0", "blocks.2.0")}
    assert repr(watch) == "Watch(Model, every=2: 3 steps, 2 reports)"
    text = str(watch)
    assert "step 2" in text
    assert "blocks.1.0" in text
    h = watch.last["max_score"][1].argmax()
    assert f"{watch.last['max_score'][1, h]:.4g} (head {h})" in text.splitlines()[3]
    for again in (pickle.loads(pickle.dumps(watch.last)), copy.deepcopy(watch.last)):
        assert str(again) == str(watch.last)
        assert again.layers == watch.last.layers
    with regard.watch(model) as watch:
        train(model, 1)
    assert repr(watch) == "Watch(Model, every=100: 1 step, 1 report)"


def test_an_error_in_report_ends_the_step_and_leaves_nothing_behind():
    def report(step, found):
        raise KeyError(step)

    model = Model()
    with pytest.raises(KeyError), regard.watch(model, report=report):
        model(batch())
    assert_left_alone(model)


def assert_left_alone(model):
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert not torch.overrides._get_current_function_mode_stack()
    assert not regard._operator.watching.watchers
    assert not nn.modules.module._global_forward_hooks


def test_an_error_of_the_model_is_no_report_and_its_step_counts():
    model = Model()
    with regard.watch(model, every=1) as watch:
        for x in (batch()[..., :3], batch()):
            with contextlib.suppress(RuntimeError):
                model(x)
        try:
            raise RuntimeError
        except RuntimeError:
            model(batch())
    assert [found.step for found in watch.history] == [1, 2]
    assert_left_alone(model)


def test_an_interruption_leaves_nothing_behind():
    model = Model()

    def interrupt(*given):
        raise KeyboardInterrupt

    model.blocks[1].register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt), regard.watch(model):
        model(batch())
    assert_left_alone(model)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_steps_after_an_interrupted_one_are_watched(is_compiled):
    model = Model()

    def interrupt(*given):
        hook.remove()
        raise KeyboardInterrupt

    if is_compiled:
        model.compile(backend="eager")
    hook = model.blocks[1].register_forward_hook(interrupt)
    with regard.watch(model, every=1) as watch:
        with pytest.raises(KeyboardInterrupt):
            model(batch())
        model(batch())
    assert [found.step for found in watch.history] == [1]


class Two(nn.Module):
    """torch's encoder and decoder, and another attention with more heads."""

    def __init__(self):
        super().__init__()
        self.both = nn.Transformer(16, 2, 1, 2, 16, 0.0, batch_first=True)
        self.attend = nn.MultiheadAttention(16, 4, batch_first=True)

    def forward(self, x, y, padding, later):
        y = self.both(
            x, y, tgt_mask=torch.ones(y.shape[1], y.shape[1], dtype=torch.bool).triu(1),
            src_key_padding_mask=padding, memory_key_padding_mask=padding,
            tgt_key_padding_mask=later,
        )  # fmt: skip
        return self.attend(y, y, y)[0]  # with weights, past torch's operator


def test_kinds_of_attention_have_names_of_their_own():
    model = Two()
    nothing = torch.zeros(2, 9, dtype=torch.bool), torch.zeros(2, 5, dtype=torch.bool)
    found = seen_by(model, batch(0, 9), batch(1, 5), *nothing)
    assert found.layers == {
        "encoder": ("both.encoder.layers.0.self_attn",),
        "decoder": ("both.decoder.layers.0.self_attn", "both.decoder.layers.1.self_attn"),
        "cross": ("both.decoder.layers.0.multihead_attn", "both.decoder.layers.1.multihead_attn"),
        "attend": ("attend",),
    }
    assert {*found} == {f"{kind}/{name}" for kind in found.layers for name in MEASURES}
    assert found["cross/first_token"].shape == (2, 2)
    assert found["attend/entropy_min"].shape == (1, 4)
    assert np.isnan(found["cross/distance"]).all()  # no common positions
    assert np.isfinite(found["encoder/distance"]).all()
    assert "both.encoder.layers.0.self_attn" in str(found)


def test_queries_of_padding_are_left_out():
    model = Two()
    padding = torch.arange(9)[None] >= torch.tensor([[9], [6]])
    later = torch.arange(5)[None] >= torch.tensor([[3], [5]])
    x, y = batch(0, 9), batch(1, 5)
    found = seen_by(model, x, y, padding, later)
    x[1, 6:], y[0, 3:] = 7.0, -7.0
    other = seen_by(model, x, y, padding, later)
    for name in found:
        if not name.startswith("attend"):  # which is not told of any padding
            np.testing.assert_allclose(found[name], other[name], rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("keys", [9, 6])
def test_no_query_of_another_text_is_taken_for_padding(keys):
    class Cross(nn.Module):
        def __init__(self):
            super().__init__()
            self.attend = nn.MultiheadAttention(16, 2, batch_first=True)

        def forward(self, x, y, padding=None):
            return self.attend(x, y, y, key_padding_mask=padding, need_weights=False)[0]

    model, x, y = Cross(), batch(0, 6), batch(1, keys)
    padding = torch.arange(keys)[None] >= torch.tensor([[4], [4]])
    found, part = seen_by(model, x, y, padding), seen_by(model, x, y[:, :4])
    for name in MEASURES - {"distance"}:
        np.testing.assert_allclose(found[name], part[name], rtol=1e-5, err_msg=name)
    if keys == 9:  # which shows that the keys are of another text
        assert np.isnan(found["distance"]).all()


def test_a_first_key_that_nobody_sees_is_padding():
    q = torch.randn(2, 2, 6, 4)
    hidden = torch.arange(6) > 0
    found = seen_by(Calls(q, q, q, mask=hidden))
    part = seen_by(Calls(q[:, :, 1:], q[:, :, 1:], q[:, :, 1:]))
    for name in found:
        np.testing.assert_allclose(found[name], part[name], rtol=1e-5, err_msg=name)


def test_a_window_and_documents_have_first_tokens_of_their_own():
    q = torch.randn(1, 2, 12, 4)
    ids = torch.tensor([[0] * 5 + [1] * 7])
    found = seen_by(Calls(q, q, q, causal=True, segments=ids))
    parts = [seen_by(Calls(x, x, x, causal=True))["first_token"] for x in q.split([5, 7], 2)]
    np.testing.assert_allclose(found["first_token"], (4 * parts[0] + 6 * parts[1]) / 10, rtol=1e-5)


def test_layers_with_fewer_heads_have_nan_for_the_rest():
    model = Model()
    model.blocks[1][0].heads = 4
    found = seen_by(model, batch())
    assert found["entropy_mean"].shape == (2, 4)
    assert np.isnan(found["entropy_mean"][0, 2:]).all()
    assert np.isfinite(found["entropy_mean"][1]).all()
    assert "nan" not in str(found)


def test_one_module_that_is_all_the_layers_has_a_row_for_each_call():
    model = Model(1)
    model.blocks = nn.ModuleList([model.blocks[0]] * 3)
    assert seen_by(model, batch())["distance"].shape == (3, 2)


@pytest.mark.parametrize("shape", [(0, 2, 5, 8), (1, 2, 0, 8), (2, 5, 8), (5, 8), (3, 2, 2, 5, 8)])
def test_any_axes_before_the_length_and_none_of_them(shape):
    class One(nn.Module):
        def forward(self, x):
            return F.scaled_dot_product_attention(x, x, x)

    x, model = torch.randn(shape), One()
    with regard.watch(model, every=1) as watch:
        for _ in range(2):
            model(x)
    heads = shape[-3] if len(shape) > 2 else 1
    assert [found["max_score"].shape for found in watch.history] == [(1, heads)] * 2 * (
        0 not in shape
    )
    if 0 not in shape:
        scores = (x @ x.mT / 8**0.5).reshape(-1, heads, 25).amax((0, 2))
        np.testing.assert_allclose(watch.last["max_score"][0], scores, rtol=1e-6)


def test_tensors_that_regard_does_not_take_are_left_out_and_the_training_goes_on():
    class One(nn.Module):
        def forward(self, x):
            return F.scaled_dot_product_attention(x, x, x)

    model, x = One(), torch.randn(1, 2, 5, 8, device="meta")
    with pytest.warns(UserWarning, match="step 0: the model is left out"), regard.watch(model):
        assert model(x).shape == x.shape


def test_regards_layers_and_autocast_are_seen():
    layer = regard.nn.MultiHeadAttention(16, 4, 2, causal=True, window=(3, 0))
    with torch.autocast("cpu", torch.bfloat16):
        found = seen_by(layer, batch())
        seen = seen_by(Model(), batch())
    assert found.layers == {"": ("",)}
    assert found["max_score"].shape == (1, 4)
    assert np.isfinite(found["distance"]).all()
    assert np.isfinite(seen["entropy_mean"]).all()
    assert "(the model)" in str(found)


@pytest.mark.parametrize("way", ["compile", "in place", "blocks"])
def test_a_compiled_model_runs_uncompiled_in_the_steps_that_are_watched(way):
    torch._dynamo.reset()
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    plain = model = Model()
    if way == "compile":
        model = torch.compile(model, backend=backend)
    elif way == "in place":
        model.compile(backend=backend)
        kept = model._compiled_call_impl
    else:
        model.blocks[0].compile(backend=backend)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor")  # of torch itself
        with regard.watch(model, every=2) as watch:
            model(batch()).backward()
            assert not compiled
            model(batch()).backward()
            assert compiled
            model(batch()).backward()
    assert [found.step for found in watch.history] == [0, 2]
    assert watch.last.layers == {"": ("blocks.0.0", "blocks.1.0")}
    if way == "in place":
        assert model._compiled_call_impl is kept
    assert_left_alone(plain)


def test_a_model_that_was_compiled_elsewhere_is_told_of():
    torch._dynamo.reset()
    model = Model()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    match = r"not called in this block.*regard.watch\(torch.compile"
    with pytest.warns(UserWarning, match=match), regard.watch(model):
        call(compiled)


def test_watches_and_a_recording_look_on_at_once():
    model = Two()
    given = batch(0, 9), batch(1, 5), torch.zeros(2, 9).bool(), torch.zeros(2, 5).bool()
    with (
        regard.watch(model) as outer, regard.watch(model) as inner,
        regard.watch(model.attend) as part, regard.record() as recording,
    ):  # fmt: skip
        model(*given)
    assert outer.last.keys() == inner.last.keys()
    assert outer.last.layers == inner.last.layers
    for name in outer.last:
        np.testing.assert_array_equal(outer.last[name], inner.last[name])
    np.testing.assert_array_equal(outer.last["attend/max_score"], part.last["max_score"])
    counts = {name: len(group.layers) for name, group in recording.batch[0].groups.items()}
    assert counts == {"encoder": 1, "decoder": 2, "cross": 2, "attend": 1}
    with regard.record() as recording, regard.patch_torch() as patched, regard.watch(model) as last:
        model(*given)
    assert last.last.layers == outer.last.layers
    assert len(patched.replaced) == 5
    assert_left_alone(model)


def test_the_compiler_is_as_it_was_after_watches_of_one_model():
    from torch._dynamo import eval_frame

    model = Model()
    with regard.watch(model), regard.watch(model):
        call(model)
    assert eval_frame._stance.stance == "default"


def test_copies_and_files_of_the_model_are_not_watched():
    model = Model()
    with regard.watch(model, every=1) as watch:
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        model(batch())
        for one in copies:
            one(batch())
    assert watch.steps == 1


def test_other_threads_are_left_alone():
    model = Model()
    with regard.watch(model, every=1) as watch:
        for target in (lambda: model(batch()), lambda: Model()(batch())):
            thread = threading.Thread(target=target)
            thread.start()
            thread.join()
        model(batch())
    assert watch.steps == 1


def test_what_is_wrong_is_said():
    model = Model()
    for wrong, error, match in (
        (("gpt2",), TypeError, "model is a str; a torch.nn.Module is needed"),
        ((model, 0), ValueError, "every is 0"),
        ((model, -3), ValueError, "every is -3"),
        ((model, 2.0), TypeError, "every is 2.0; an int is needed"),
        ((model, True), TypeError, "every is True"),
        ((model, 10, "print"), TypeError, r"report is a str; a function report\(step, found\)"),
    ):
        with pytest.raises(error, match=match):
            regard.watch(*wrong)
    with pytest.raises(TypeError, match="start is None"):
        regard.watch(model, start=None)
    watch = regard.watch(model, every=np.int64(5))
    with watch, contextlib.ExitStack() as stack:
        call(model)
        with pytest.raises(RuntimeError, match="open already"):
            stack.enter_context(watch)


def test_a_watch_without_steps_or_attention_says_so():
    model, match = Model().eval(), "all 2 calls of the model were in evaluation mode"
    with pytest.warns(UserWarning, match=match), regard.watch(model):
        call(model, 2)
    match = "the one call of the model was in evaluation mode"
    with pytest.warns(UserWarning, match=match), regard.watch(model):
        call(model)
    with pytest.warns(UserWarning, match="the model was not called"), regard.watch(Model()):
        pass
    model = nn.Linear(16, 16)
    match = "no attention was measured in step 0"
    with pytest.warns(UserWarning, match=match) as told, regard.watch(model, every=1) as watch:
        call(model, 2)
    assert len(told) == 1
    assert watch.last is None
    with pytest.raises(ZeroDivisionError), regard.watch(Model()):
        raise ZeroDivisionError  # and nothing else is said


def test_attention_that_cannot_be_measured_is_left_out_with_its_reason():
    class Mapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = regard.nn.SelfAttention(16, 16)

        def forward(self, x):
            return torch.func.vmap(self.one)(x)

    model, match = Mapped(), "watch: step 0: one is left out: .* no numbers .*vmap"
    with pytest.warns(UserWarning, match=match) as told, regard.watch(model, 1) as watch:
        call(model, 2)
    assert len(told) == 1
    assert told[0].filename == __file__
    assert "vmap" in watch.left_out["one"]
    assert "one left out: called where" in str(watch)


def test_what_grad_follows_is_measured():
    model, x = Model().eval(), batch()
    exact = seen_by(model, x, evaluation=True)
    with regard.watch(model, evaluation=True) as watch:
        gradient = torch.func.grad(model)(x)
    for name, found in exact.items():
        np.testing.assert_array_equal(watch.last[name], found)
    torch.testing.assert_close(gradient, torch.func.grad(model)(x))


def test_steps_within_vmap_that_are_not_watched_go_on():
    model = regard.nn.SelfAttention(16, 16)
    with regard.watch(model, start=1) as watch:
        found = torch.func.vmap(model)(batch())
    assert watch.steps == 1
    torch.testing.assert_close(found, model(batch()))


def dense_first(q, k, bias=None, causal=False):
    """The first score that is NaN or inf, in float32 and by loops."""
    (B, Hq, Lq, D), group = q.shape, q.shape[1] // k.shape[1]
    for b, h, i, j in np.ndindex(B, Hq, Lq, k.shape[2]):
        if causal and j > k.shape[2] - Lq + i:
            continue
        with np.errstate(all="ignore"):
            s = (q[b, h, i] * k[b, h // group, j]).sum() * np.float32(D**-0.5)
            s = s if bias is None else s + bias[i, j]
        if np.isnan(s) or s == np.inf:
            return b, h, i, j, s
    return None


def spoilt(which, value):
    """Query, key and bias with one number that is not finite, or too large."""
    rng = np.random.default_rng(0)
    q, k = (rng.standard_normal((2, heads, 6, 4), np.float32) for heads in (4, 2))
    bias = rng.standard_normal((6, 6), np.float32)
    if which == "query":
        q[1, 2, 3, 1] = value
    elif which == "key":
        k[0, 1, 4, 2] = value
    elif which == "bias":
        bias[4, 2] = value
    else:
        q[1, 3, 2], k[1, 1, 1] = value, value
    return q, k, bias


SPOILT = [
    ("query", np.nan), ("query", np.inf), ("key", np.nan), ("key", -np.inf), ("bias", np.nan),
    ("bias", np.inf), ("score", np.float32(1e20)),
]  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
@pytest.mark.parametrize(("which", "value"), SPOILT)
def test_the_first_score_that_is_not_finite_is_found(which, value, backend):
    q, k, bias = spoilt(which, value)
    model = Calls(*map(torch.from_numpy, (q, k, k)), causal=True, bias=torch.from_numpy(bias))
    told, match = [], "watch: step 0: the model, head"
    with (
        mock.patch.object(_backends, "BACKENDS", (backend,)),
        pytest.warns(RuntimeWarning, match=match) as warned,
        regard.watch(model, 1, lambda step, found: told.append(found)) as watch,
    ):
        [model() for _ in range(2)]
    found = watch.nonfinite
    assert isinstance(found, NonFinite)
    with np.errstate(over="ignore"):
        exact = dense_first(q, k, bias, causal=True)
    np.testing.assert_equal(found[2:7], exact)
    assert (found.step, found.layer, found.cause) == (0, "", which)
    assert told[0].nonfinite == found
    assert len(warned) == 1  # once
    assert str(found) in str(watch)
    assert not np.isfinite(told[0]["max_score"][0, found.head])


def test_what_hides_is_no_finding():
    q = torch.randn(1, 2, 5, 4)
    q[:, :, 3] = torch.nan  # masked below
    mask = torch.ones(5, 5, dtype=torch.bool)
    mask[:, 3] = mask[3] = False
    bias = torch.zeros(5, 5)
    bias[2], bias[:, 1] = -torch.inf, -torch.inf  # a query of which all scores are −∞
    found = seen_by(Calls(q, q, q, mask=mask, bias=bias))
    assert found.nonfinite is None


def test_a_sink_that_is_not_finite_is_found():
    q = torch.randn(1, 2, 5, 4)
    with pytest.warns(RuntimeWarning, match="head 1: the logit of its sink is nan"):
        found = seen_by(Calls(q, q, q, sinks=torch.tensor([0.0, torch.nan])))
    assert found.nonfinite[3:5] == (1, 0)
    assert found.nonfinite.cause == "sink"


@pytest.mark.filterwarnings("error")
def test_a_sink_that_takes_nothing_is_no_finding():
    q, hidden = torch.randn(1, 2, 5, 4), torch.full((5, 5), -torch.inf)
    sinks = torch.full((2,), -torch.inf)
    for bias in (torch.zeros(5, 5), hidden):
        assert seen_by(Calls(q, q, q, sinks=sinks, bias=bias)).nonfinite is None


class Broken(Model):
    """A model whose second attention gets NaN where there are five tokens."""

    def __init__(self, logits=False):
        super().__init__()
        self.logits, self.calls = logits, 0

    def forward(self, x):
        self.calls += 1
        x = F.dropout(x, training=self.training)
        x = x + self.blocks[0](x)
        if x.shape[1] == 5:
            x[1, 3] = torch.nan
        x = self.norm((x + self.blocks[1](x)).mT).mT
        return x if self.logits else x.square().mean()


def run_into_nan(model, every=100, **options):
    """Three steps, of which the third meets NaN."""
    told = []
    with regard.watch(model, every, lambda step, found: told.append(step), **options) as watch:
        for length in (7, 7, 5):
            model(batch(0, length)).sum().backward()
    return watch, told


@pytest.mark.parametrize("logits", [False, True])
def test_nan_between_watched_steps_is_found_at_once(logits):
    torch.manual_seed(3)
    plain = Broken(logits=logits)
    with pytest.warns(RuntimeWarning, match="step 2"):
        each, _ = run_into_nan(plain, every=1)
    state = torch.get_rng_state()
    torch.manual_seed(3)
    model = Broken(logits=logits)
    with pytest.warns(RuntimeWarning, match=r"step 2: blocks\.1\.0, head 0"):
        watch, told = run_into_nan(model)
    assert told == [0, 2]
    for name, x in each.last.items():  # what the pass itself had, dropout included
        np.testing.assert_array_equal(watch.last[name], x)
    assert watch.nonfinite[:6] == (2, "blocks.1.0", 1, 0, 3, 0)
    assert watch.nonfinite.cause == "query"
    assert model.calls == plain.calls + 1  # the pass was repeated
    assert torch.equal(torch.get_rng_state(), state)
    for x, exact in zip(model.buffers(), plain.buffers()):
        np.testing.assert_array_equal(x, exact)
    for x, exact in zip(model.parameters(), plain.parameters()):
        np.testing.assert_array_equal(x.grad, exact.grad)


def test_nan_between_watched_steps_waits_where_nobody_may_look(monkeypatch):
    watch, told = run_into_nan(Broken(), check_nan=False)
    assert (watch.nonfinite, told) == (None, [0])
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    watch, told = run_into_nan(Broken())
    assert (watch.nonfinite, told) == (None, [0])


class Elsewhere(Model):
    """A model whose loss is NaN though its attention is not."""

    def forward(self, x):
        return {"hidden": x, "loss": super().forward(x) * torch.nan}


def test_nan_that_is_not_of_attention_is_said_and_no_longer_searched_for():
    model = Elsewhere()
    match = "output holds NaN, and no score of attention"
    with pytest.warns(RuntimeWarning, match=match) as told, regard.watch(model, start=1) as watch:
        call(model, 5)
    assert len(told) == len(watch.history) == 3
    assert watch.nonfinite is None


def test_a_pass_that_cannot_be_repeated_is_said():
    class Once(Model):
        def forward(self, x):
            assert not hasattr(self, "done"), "done already"
            self.done = True
            return super().forward(x) * torch.nan

    model, match = Once(), "repeating the pass to look for it failed: done already"
    with pytest.warns(RuntimeWarning, match=match), regard.watch(model, start=1):
        call(model)
    assert_left_alone(model)
