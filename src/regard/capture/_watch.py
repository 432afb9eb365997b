"""``regard.watch``: what the heads of a model do while it trains, every so many steps."""

from __future__ import annotations

import contextlib
import operator
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module

from regard._base.errors import a_type
from regard._base.settings import counted
from regard._call.checks import read_flag
from regard._operator.torch_calls import Hook, Running, is_in_backward, is_running, uncompiled
from regard.capture._calls import NOT_SEEN, calls_taken, has_no_numbers, left_out
from regard.capture._groups import group_names
from regard.capture._measured import NonFinite
from regard.capture._pass import Pass
from regard.capture._report import WatchReport

OURS = ("torch.", "regard.")
MOST_SEARCHES = 3  # passes that are repeated in vain before a watch stops repeating them
Report = Callable[[int, WatchReport], object]


class Watch:
    """What a watch saw, and sees in its ``with`` block; ``print`` it.

    Attributes:
        steps: how many calls of the model were counted.
        history: the reports, in order.
        nonfinite: the first score that was NaN or infinite, or None; no other is looked for.
        left_out: for each module by name, why its attention could not be measured.
    """

    def __init__(
        self,
        model: Module,
        every: int,
        report: Report | None,
        start: int,
        evaluation: bool,
        check_nan: bool | None,
    ) -> None:
        self.steps = 0
        self.history: list[WatchReport] = []
        self.nonfinite: NonFinite | None = None
        self.left_out: dict[str, str] = {}
        self._model, self._every, self._report = model, every, report
        self._start, self._evaluation, self._check_nan = start, evaluation, check_nan
        self._named: Module = getattr(model, "_orig_mod", model)  # of what torch.compile gives
        self._thread: int | None = None  # of the with block
        self._calls: list[_Call | None] = []  # of the model that run; None is not counted
        self._ignored = 0  # calls in evaluation mode
        self._searches = 0
        self._has_warned = False
        self._patterns: list[str] = []  # of every kind of layer that was seen

    @property
    def last(self) -> WatchReport | None:
        """The last report, or None."""
        return self.history[-1] if self.history else None

    def __enter__(self) -> Self:
        if self._thread is not None:
            raise RuntimeError("watch: it is open already; make another one to watch twice.")
        self._thread = threading.get_ident()
        self._attached = contextlib.ExitStack()
        model: Any = self._model
        compiled = model._compiled_call_impl
        if compiled is not None:  # by model.compile(): hooks would become part of its graph
            around = model._compiled_call_impl = _Around(self, compiled)
            self._attached.callback(_detach, model, around)
        else:
            before = model.register_forward_pre_hook(Hook(self._before), with_kwargs=True)
            self._attached.callback(before.remove)
            # First of the hooks, so that watches end in the reverse order.
            after = model.register_forward_hook(
                Hook(self._after), prepend=True, with_kwargs=True, always_call=True
            )
            self._attached.callback(after.remove)
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._thread = None
        self._attached.close()
        self._end_interrupted()
        if kind is None and not self.steps and not self._has_warned:
            _warn(self._why_nothing())

    def _end_interrupted(self) -> None:
        """Ends the calls that an interruption left."""
        while self._calls:
            if (call := self._calls.pop()) is not None:
                call.end()

    def __repr__(self) -> str:
        return (
            f"Watch({type(self._named).__name__}, every={self._every}: "
            f"{counted(self.steps, 'step')}, {counted(len(self.history), 'report')})"
        )

    def __str__(self) -> str:
        lines = [repr(self)]
        if self.last is not None:
            lines.append(str(self.last))
        if self.nonfinite is not None and (self.last is None or self.last.nonfinite is None):
            lines.append(str(self.nonfinite))
        lines += [f"{name or 'the model'} left out: {why}" for name, why in self.left_out.items()]
        return "\n".join(lines)

    def _why_nothing(self) -> str:
        if self._ignored:
            count = self._ignored
            calls = "the one call" if count == 1 else f"all {count} calls"
            return (
                f"{calls} of the model {'was' if count == 1 else 'were'} in evaluation mode; call"
                " model.train(), or watch that too: regard.watch(model, evaluation=True)."
            )
        return (
            "the model was not called in this block and thread. What torch.compile makes of a "
            "model is another one, and watched by itself: regard.watch(torch.compile(model))."
        )

    def _before(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A call of the model begins."""
        if torch.compiler.is_compiling():
            return
        if threading.get_ident() != self._thread:
            return
        if self._calls and module._compiled_call_impl is None and not is_running(module):
            self._end_interrupted()
        self._calls.append(self._begun())

    def _begun(self) -> _Call | None:
        """The call that begins, where it is a step."""
        if self._calls or is_in_backward():  # of itself, or once more in a checkpoint
            return None
        if not (self._named.training or self._evaluation):
            self._ignored += 1
            return None
        step = self._start + self.steps
        self.steps += 1
        seen, ending = None, None
        if step % self._every == 0:
            ending = contextlib.ExitStack()
            seen = ending.enter_context(self._seen(step))
        return _Call(step, seen, ending, sys.exc_info()[1], self._random_states())

    def _after(
        self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """A call of the model ends, by an error too."""
        if torch.compiler.is_compiling() or threading.get_ident() != self._thread:
            return
        if not self._calls or (call := self._calls.pop()) is None:
            return
        call.end()
        if sys.exc_info()[1] is not call.error:  # another error than at the beginning
            return
        if call.seen is not None:
            self._tell(call.seen)
        elif call.random and _is_nan(output, self._check_nan):
            self._search(call, args, kwargs)

    @contextlib.contextmanager
    def _seen(self, step: int) -> Iterator[Pass]:
        """Measures the attention that the model computes in the block."""
        seen = Pass(step, self._named, self.left_out, self.nonfinite is None)
        with _uncompiled(), calls_taken(Running(model=self._named), seen.take, seen.refuse):
            yield seen

    def _tell(self, seen: Pass, is_nan: bool = False) -> None:
        """Reports a pass that has ended."""
        by_reason: dict[str, list[str]] = {}
        for name, why in seen.refused.items():
            by_reason.setdefault(why, []).append(name)
        for why, names in by_reason.items():
            _warn(f"step {seen.step}: {left_out(names)} left out: {why}")
        if not seen.taken:
            if not seen.is_empty:
                self._warn_of_nothing(seen.step)
            return
        report = WatchReport(seen.step, self._by_kind(seen), seen.nonfinite)
        self.history.append(report)
        self.nonfinite = self.nonfinite or seen.nonfinite
        if self._report is not None:
            self._report(seen.step, report)
        if seen.nonfinite is not None:
            _warn(str(seen.nonfinite), RuntimeWarning)
        elif is_nan:
            _warn(
                f"step {seen.step}: the model's output holds NaN, and no score of attention does: "
                "look for it in the values, or after attention.", RuntimeWarning,
            )  # fmt: skip

    def _warn_of_nothing(self, step: int) -> None:
        if self._has_warned or self.left_out:
            return
        self._has_warned = True
        way_out = ""
        if hasattr(self._named, "set_attn_implementation"):
            way_out = ' Call model.set_attn_implementation("sdpa") or ("regard").'
        _warn(f"no attention was measured in step {step}. {NOT_SEEN}{way_out}")

    def _by_kind(self, seen: Pass) -> dict[str, list[tuple[str, dict[str, np.ndarray]]]]:
        """The layers of a pass by the short names of their kinds, in the order of their calls."""
        for pattern, *_ in seen.taken:
            if pattern not in self._patterns:
                self._patterns.append(pattern)
        kinds = dict(zip(self._patterns, group_names(self._patterns)))
        found: dict[str, list[tuple[str, dict[str, np.ndarray]]]] = {}
        for pattern, name, measures in seen.taken:
            found.setdefault(kinds[pattern], []).append((name, measures))
        return found

    def _random_states(self) -> tuple[Tensor, ...]:
        """The states of torch's generators, where the pass may be repeated; else none."""
        if self._check_nan is False or self.nonfinite is not None:
            return ()
        if self._searches >= MOST_SEARCHES or _is_one_of_several():
            return ()
        if not (self._check_nan and torch.cuda.is_initialized()):
            return (torch.get_rng_state(),)
        return torch.get_rng_state(), *torch.cuda.get_rng_state_all()

    def _search(self, call: _Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Repeats a pass whose output holds NaN, and measures it: parameters are still the same."""
        self._searches += 1
        cpu, *others = call.random
        devices = list(range(len(others)))
        with torch.random.fork_rng(devices), torch.no_grad(), _buffers_kept(self._named):
            torch.set_rng_state(cpu)
            for device, state in zip(devices, others):
                torch.cuda.set_rng_state(state, device)
            self._calls.append(None)  # whatever calls the model in it is no step
            try:
                with self._seen(call.step) as seen:
                    self._named.forward(*args, **kwargs)
            except Exception as error:
                _warn(
                    f"step {call.step}: the model's output holds NaN, and repeating the pass to "
                    f"look for it failed: {error}", RuntimeWarning,
                )  # fmt: skip
                return
            finally:
                self._calls.pop()
        self._tell(seen, is_nan=True)


class _Call(NamedTuple):
    """A call of the model that is a step."""

    step: int
    seen: Pass | None  # where it is measured
    ending: contextlib.ExitStack | None
    error: BaseException | None  # that was being handled when it began
    random: tuple[Tensor, ...]

    def end(self) -> None:
        if self.ending is not None:
            self.ending.close()


def watch(
    model: Module,
    every: int = 100,
    report: Report | None = None,
    *,
    start: int = 0,
    evaluation: bool = False,
    check_nan: bool | None = None,
) -> Watch:
    """Watches what the heads of a model do while it trains in the ``with`` block.

        with regard.watch(model, every=100, report=f) as watch:
            for inputs, targets in batches:
                loss = model(inputs, targets)
                ...
        print(watch)

    In every ``every``-th step, of each head of each layer: the largest score, mean and least
    entropy, the weight on the first token, and the mean distance; and the first score that is NaN
    or infinite. Nothing that the model computes changes, and no gradient flows through. Memory is
    linear in the lengths; other steps cost some microseconds.

    A step is a call of the model in training mode, by the thread of the block, from 0 on: with
    gradient accumulation each batch is one; what a checkpoint computes again is none. Calls of
    ``regard.attention`` and ``torch.nn.functional.scaled_dot_product_attention`` are seen, and so
    all that is built on them. A compiled model runs uncompiled in the steps that are watched.

    Args:
        model: any module of torch; of a compiled one, what ``torch.compile`` gave.
        every: steps from one report to the next; the first is at a multiple of it.
        report: called as ``report(step, found)`` when the model has computed its output; ``found``
            has float64 arrays of NumPy ``(layers, heads)`` by name, see ``WatchReport``. What it
            raises ends the step.
        start: the number of the first step, where a training goes on.
        evaluation: count and watch calls in evaluation mode too.
        check_nan: whether to look for NaN in the model's output after every step, and where there
            is one, to repeat the pass at once and find the score that it began with. By default on
            the CPU, where the look costs microseconds; a GPU waits for it. Never while
            ``torch.distributed`` runs.

    Returns:
        A ``Watch``, for a ``with`` statement; it keeps every report.

    Raises:
        TypeError: no module of torch, no int, no bool, or a report that cannot be called.
        ValueError: ``every`` is below 1.

    Source: docs/watch.md; Zhai et al. 2023 (entropy collapse), Dehghani et al. 2023 (growth of the
    largest score), Xiao et al. 2023 (attention sinks).
    """
    if not isinstance(model, Module):
        raise TypeError(f"watch: model is {a_type(model)}; a torch.nn.Module is needed.")
    every, start = _int("every", every), _int("start", start)
    if every < 1:
        raise ValueError(f"watch: every is {every}; 1, each step, is the least.")
    if report is not None and not callable(report):
        raise TypeError(
            f"watch: report is {a_type(report)}; a function report(step, found) is "
            "needed, or None to read watch.last and watch.history."
        )
    evaluation = read_flag("evaluation", evaluation, "watch")
    if check_nan is not None:
        check_nan = read_flag("check_nan", check_nan, "watch")
    return Watch(model, every, report, start, evaluation, check_nan)


def _int(name: str, x: Any) -> int:
    if not isinstance(x, bool):
        with contextlib.suppress(TypeError):
            return operator.index(x)
    raise TypeError(f"watch: {name} is {x!r}; an int is needed.")


def _warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Warns in the line that calls the model: the first outside of torch and regard."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(OURS):
        frame, level = frame.f_back, level + 1
    warnings.warn(f"watch: {text}", category, stacklevel=level)


def _uncompiled() -> contextlib.AbstractContextManager[Any]:
    """Runs what torch.compile made as it was; the compiler is not loaded where none is in use."""
    if "torch._dynamo" not in sys.modules:
        return contextlib.nullcontext()
    return uncompiled()


def _is_one_of_several() -> bool:
    """Whether other processes wait for what this one computes."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _is_nan(output: Any, check: bool | None) -> bool:
    """Whether a model's output holds NaN: its loss, or else one number of each token."""
    if isinstance(output, Tensor):
        tensors = [output]
    else:
        parts = output.values() if isinstance(output, Mapping) else output
        parts = parts if isinstance(output, (Mapping, tuple, list)) else ()
        tensors = [x for x in parts if isinstance(x, Tensor) and x.is_floating_point()]
    if not tensors:
        return False
    x = next((x for x in tensors if x.ndim == 0), tensors[0]).detach()
    if has_no_numbers(x) or (check is None and x.device.type != "cpu"):
        return False
    if x.ndim == 0:
        number = x.item()  # a tenth of the time of isnan
        return bool(number != number)
    return bool((x[..., 0] if x.ndim > 1 and x.shape[-1] else x).isnan().any())


@contextlib.contextmanager
def _buffers_kept(model: Module) -> Iterator[None]:
    """Puts the model's buffers back, past autograd, which may have kept them for the gradients."""
    before = [(x, x._version, x.clone()) for x in model.buffers() if not x.is_inference()]
    try:
        yield
    finally:
        for x, version, copy in before:
            if x._version != version:
                x.data.copy_(copy)


class _Around:
    """A compiled call of a model, with a watch around it."""

    def __init__(self, watch: Watch, compiled: Callable[..., Any]) -> None:
        self._watch, self.compiled = watch, compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model, output = self._watch._model, None
        self._watch._before(model, args, kwargs)
        try:
            output = self.compiled(*args, **kwargs)
        except BaseException:
            self._watch._after(model, args, kwargs, None)
            raise
        self._watch._after(model, args, kwargs, output)
        return output


def _detach(model: Any, around: _Around) -> None:
    if model._compiled_call_impl is around:  # nobody has compiled it anew
        model._compiled_call_impl = around.compiled
