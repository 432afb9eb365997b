"""``regard.record``: the attention of any torch model, layer by layer, as a recording."""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.jit import ScriptModule
from torch.nn import Module

from regard._base.errors import RecordingError, ShapeError, UnsupportedError
from regard._operator import watching
from regard._operator.torch_calls import Hook, Running, Sources, is_running, taken_away, uncompiled
from regard.capture._calls import (
    WITHOUT_NUMBERS,
    AreOfOne,
    allowed,
    calls_taken,
    has_no_numbers,
    is_within,
    left_out,
)
from regard.capture._explanation import Explanation
from regard.capture._files import Unread
from regard.capture._groups import Place, places
from regard.capture._recorder import Describe, Recorder
from regard.capture._taken import Described, Taken
from regard.recording import Recording

# Of ``record``: layers, heads, values, path and explain.
Choice = tuple[
    Collection[int] | None,
    Collection[int] | None,
    bool,
    str | Path | None,
    Callable[[Any], Tensor] | None,
]
# Gets a module that is called, and its arguments.
Note = Callable[[Module, tuple[Any, ...], dict[str, Any]], None]
OPERATOR = "scaled_dot_product_attention"
SCRIPTED = "TorchScript, whose calls are not seen; record what it was made of."
_ONE = threading.Lock()  # held while a record is open


class Recorded(Recording[Tensor]):
    """The recording of what runs in a ``with`` block, filled when it ends.

    Of one text it is the recording itself; ``batch`` has a ``regard.Recording`` for each text.
    """

    _texts: tuple[Recording[Tensor], ...] | None = None  # of several, and none of one
    _unread: Unread | None = None  # its file, until it is asked for anything

    @property
    def batch(self) -> tuple[Recording[Tensor], ...]:
        """A recording for each text."""
        if self._texts is None:
            raise RecordingError(
                "record: there is nothing yet; the recording is filled when the with block ends."
            )
        return self._texts or (self,)

    def __getattr__(self, name: str) -> Any:  # called for what is not there yet
        if name.startswith("__") or not hasattr(type(self), name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if self._unread is not None:
            self._take(self._unread())
            return getattr(self, name)
        raise RecordingError(
            f"record: a batch of {len(self.batch)} texts was recorded, each of them a recording: "
            "recording.batch[0]."
        )

    def __repr__(self) -> str:
        if self._texts is None:
            return "Recorded(nothing yet: the with block runs, or an error ended it)"
        if self._texts:
            return f"Recorded(batch of {len(self.batch)}: recording.batch[0] is {self.batch[0]!r})"
        return super().__repr__()

    def __getstate__(self) -> object:
        if self._texts:
            return vars(self).copy(), {}
        if self._unread is not None:
            self._take(self._unread())
        return super().__getstate__()

    @classmethod
    def _of(cls, found: Recording[Any] | Unread) -> Recording[Any]:
        """A recording, or one that is in a file."""
        if isinstance(found, Recording):
            return found
        made = cls.__new__(cls)
        made._fill([found])
        return made

    def _fill(self, found: Sequence[Recording[Any] | Unread]) -> None:
        several = found if len(found) > 1 else ()
        self._texts = tuple(Recorded._of(one) for one in several)
        if several:
            return
        (only,) = found
        if isinstance(only, Recording):
            self._take(only)
        else:
            self._unread = only

    def _take(self, recording: Recording[Any]) -> None:
        for name in Recording.__slots__:
            setattr(self, name, getattr(recording, name))
        self._unread = None


@contextlib.contextmanager
def record(
    tokens: Sequence[str] | None = None,
    *,
    layers: Collection[int] | None = None,
    heads: Collection[int] | None = None,
    values: bool = False,
    path: str | Path | None = None,
    explain: Callable[[Any], Tensor] | None = None,
) -> Iterator[Recording[Tensor]]:
    """Records the attention of whatever torch model runs in the ``with`` block.

        with regard.record(tokens=texts) as recording:
            model(ids)
        recording.weights[5][3, 17]

    It takes the query and key of every ``torch.nn.functional.scaled_dot_product_attention`` and
    ``regard.attention`` that this thread calls, layer by layer under the modules' names, and
    changes no number. Further calls of the model must be the steps of one generation with a cache.
    Padding is left out: keys at the ends that no query sees, and their queries where both are known
    to be of the same tokens. Compiled models run uncompiled in it.

    Args:
        tokens: texts of the keys, padding included; of a batch, a list for each element. By default
            numbers.
        layers, heads: numbers of those to record, by default all. They keep their numbers.
        values: record the values too, for what ``Recording.steps`` and the viewer show of them.
        path: a ``.safetensors`` file that each layer is written to as it comes, and that is there
            when the block ends: whole or not at all. A batch gets one for each element, by number.
            The recording reads it when it is first asked for anything.
        explain: gives one number for the model's output, such as a token's loss or a class:
            ``explain=lambda logits: logits[0, -1, 42]``. Its gradients by the output of every
            attention are kept, with the values, for ``Recording.effects``, by one backward, which
            leaves the parameters' own. It is of one pass, that of the outermost module, with
            torch's gradients on; a file is written when the block ends.

    Yields:
        The recording: ``regard.Recording`` when the block has ended. Of a batch,
        ``recording.batch`` has one for each element. Layers with other tokens, as those of an
        encoder, are its ``groups``.

    Raises:
        RecordingError: no attention was computed, or calls that no recording holds together; with
            ``explain``, gradients are off, or the number does not depend on any attention.
        ShapeError: the tokens are not as many as the keys; ``explain`` gave several numbers.
        TypeError, ValueError: numbers of layers or heads that are none, ``values`` that is no bool,
            or a name of another kind of file.

    Source: docs/recording.md.
    """

    lists = None if tokens is None else _lists(tokens)

    def describe(group: str, taken: Taken, b: int) -> Described:
        if lists is None or not taken.is_main:
            return Described()
        if len(lists) not in (1, taken.batch):
            raise ShapeError(
                f"record: tokens of {len(lists)} texts are given, and the batch has {taken.batch}."
            )
        return Described(lists[b if len(lists) > 1 else 0])

    choice = layers, heads, values, path, explain
    with recording_of(describe, choice, _torch_followed) as recording:
        yield recording


def _lists(tokens: Any) -> list[list[str]]:
    """The tokens of each text."""
    if isinstance(tokens, Module):
        raise TypeError(
            "record: a model is given, and what runs in the with block is recorded; leave it out:"
            " with regard.record(). Models of transformers have regard.hf.record(model)."
        )
    given = list(tokens) if _is_several(tokens) else []
    if given and all(isinstance(text, str) for text in given):
        return [given]
    lists: list[list[Any]] = [list(part) if _is_several(part) else [None] for part in given]
    if not lists or not all(isinstance(text, str) for part in lists for text in part):
        raise TypeError(
            "record: tokens are texts, one str for each token, or for a batch a list of them for "
            "each text; leave them out to have numbers."
        )
    return lists


def _is_several(x: Any) -> bool:
    return isinstance(x, Iterable) and not isinstance(x, (str, Tensor))


@contextlib.contextmanager
def recording_of(
    describe: Describe,
    choice: Choice,
    following: Callable[[Recorder], contextlib.AbstractContextManager[None]],
    name: str = "",
    text: str = "",
) -> Iterator[Recorded]:
    """Records what runs in the block; see ``record``.

    Args:
        describe: gives the tokens, when the block has ended.
        choice: layers, heads, values, path and explain, as of ``record``.
        following: makes a context in which a recorder is given the calls of attention.
        name: of the model, for people.
        text: the name of the module whose layers read the text; by default that of the model.
    """
    if not _ONE.acquire(blocking=False):
        raise RecordingError("record: another record is open; leave its with block first.")
    with contextlib.ExitStack() as stack:
        stack.callback(_ONE.release)
        layers, heads, values, path, explain = choice
        explanation = None if explain is None else Explanation(explain)
        recorder = Recorder(
            layers=layers, heads=heads, values=values, path=path, explanation=explanation,
            text=text,
        )  # fmt: skip
        recording = Recorded.__new__(Recorded)
        stack.push(lambda kind, error, trace: recorder.close(error))
        stack.enter_context(uncompiled())
        with following(recorder):
            yield recording
        recording._fill(recorder.finished(describe, name))


@contextlib.contextmanager
def _torch_followed(recorder: Recorder) -> Iterator[None]:
    """Hands every call of attention to a recorder, under the name of the module that runs."""
    running = Running(recorder.begin_pass, end=recorder.end_pass)

    @functools.cache  # for this block: a model may change after it
    def places_of(model: Module | None, kind: Any) -> dict[str, Place]:
        return places({name: x for name, x in running.modules.items() if type(x) is kind})

    def take(
        name: str, query: Any, key: Any, value: Any, options: dict[str, Any], are_of_one: AreOfOne
    ) -> Any:
        kind: Any = type(running.modules.get(name))
        own = name, places_of(running.model, kind)
        return recorder.take(*own, query, key, value, options, are_of_one, allowed())

    left: dict[str, dict[str, None]] = {}  # names of modules, by the reason

    def leave(name: str, error: Exception) -> None:
        if not isinstance(error, UnsupportedError):
            raise error
        left.setdefault(str(error).partition("\n")[0], {})[name] = None

    with calls_taken(running, take, leave, explains=recorder.explains):
        yield
    if scripted := _scripted(running.modules):
        left[SCRIPTED] = dict.fromkeys(scripted)
    for why, names in left.items():
        warnings.warn(f"record: {left_out(names)} left out: {why}", stacklevel=7)


def _scripted(modules: Mapping[str, Module]) -> list[str]:
    """Those that TorchScript runs, with attention in it, without the modules within them."""
    found: list[str] = []
    for name, module in modules.items():
        if not isinstance(module, ScriptModule) or any(is_within(name, outer) for outer in found):
            continue
        if hasattr(module, "forward") and OPERATOR in str(module.inlined_graph):
            found.append(name)
    return found


@contextlib.contextmanager
def model_followed(
    names: Mapping[Module, str], roots: Sequence[Module], note: Note,
    attending: Sequence[Module], recorder: Recorder,
) -> Iterator[None]:  # fmt: skip
    """Hands the calls of attention to a recorder of which the caller says the module.

    Args:
        names: of the modules of a model.
        roots: it, and the modules of it that are called by themselves.
        note: gets each of them that is called, and what with.
        attending: modules of which the projections tell whose tokens queries and keys are.
        recorder: gets the calls.
    """
    thread, sources = threading.get_ident(), Sources()
    running: list[Module] = []  # of the roots

    @functools.cache
    def places_of(kind: Any) -> dict[str, Place]:  # of modules
        return places({name: module for module, name in names.items() if type(module) is kind})

    def take(query: Any, key: Any, value: Any, options: dict[str, Any]) -> Any:
        module: Any = watching.modules.get(threading.get_ident())
        kind: Any = type(module)
        # Another model's is none of it, nor what another thread computes with this one.
        if module not in names or threading.get_ident() != thread:
            return None
        if has_no_numbers(query, key):
            raise UnsupportedError(f"record: {names[module]} cannot be recorded: {WITHOUT_NUMBERS}")
        are_of_one = functools.partial(sources.are_of_one, query, key, value)
        own = names[module], places_of(kind)
        return recorder.take(*own, query, key, value, options, are_of_one, allowed())

    def enter(module: Module, args: Any, kwargs: Any) -> None:
        if threading.get_ident() != thread:
            return
        if running and running[0] is module and not is_running(module):
            running.clear()  # which an interruption left
        if not running:
            recorder.begin_pass()
        running.append(module)
        note(module, args, kwargs)

    def leave(module: Module, args: Any, output: Any) -> None:
        if threading.get_ident() == thread and taken_away(running, module) and not running:
            recorder.end_pass(output)

    hooks = []
    for root in roots:
        hooks += [
            root.register_forward_pre_hook(Hook(enter), with_kwargs=True),
            root.register_forward_hook(Hook(leave), always_call=True),
        ]
    try:
        with sources.followed(attending), watching.watched(take):
            yield
    finally:
        for hook in hooks:
            hook.remove()
