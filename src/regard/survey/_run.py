"""Running the shards of a survey: here, in processes of this machine, or on anyone's executor.

``multiprocessing.Pool`` is not used: it waits for ever for a task whose worker was killed.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from regard._base.errors import a_type
from regard.survey._corpus import SurveyError
from regard.survey._manifest import Manifest
from regard.survey._models import NO_MODEL, Reader, loaded
from regard.survey._shard import HEADS, file_of, read_facts, write_shard
from regard.survey._threads import threads

RETRIES = 2  # of a shard whose process ended
POLL_SECONDS = 0.2
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
OLD_SECONDS = 3600  # after which an unfinished file is nobody's any more


class Progress(NamedTuple):
    """How far a survey is.

    Attributes:
        tokens: that are done, those of earlier runs too.
        total: of the shards that this run is about, and of those that are done, as far as it is
            known: of shards to come an estimate.
        rate: tokens a second of this run; 0 before it has any.
        seconds: that are left at this rate; None before it has any.
        shards, of: how many are done, and how many the survey has, those of other runs too.
    """

    tokens: int
    total: int
    rate: float
    seconds: float | None
    shards: int
    of: int


class Meter:
    """Tokens done and to come, told to whoever listens.

    Args:
        estimates: tokens of every shard, about; 0 of those that this run is not about.
        done: tokens of the shards that are done.
        tell: is given the progress.
    """

    def __init__(
        self, estimates: Sequence[int], done: dict[int, int],
        tell: Callable[[Progress], object] | None,
    ) -> None:  # fmt: skip
        self._estimates, self._done, self._tell = list(estimates), dict(done), tell
        self._before = sum(done.values())
        self._running: dict[int, int] = {}
        self._began = time.monotonic()

    def running(self, number: int, tokens: int) -> None:
        """A shard has done so many tokens."""
        if number not in self._done:
            self._running[number] = tokens
            self._say()

    def finished(self, number: int, tokens: int) -> None:
        """A shard is done."""
        self._running.pop(number, None)
        if number not in self._done:
            self._done[number] = tokens
            self._say()

    def stopped(self, number: int) -> None:
        """A shard is not done, and not running any more."""
        self._running.pop(number, None)

    def failed(self, number: int) -> None:
        """A shard will not be done in this run."""
        self._running.pop(number, None)
        self._estimates[number] = 0
        self._say()

    def _say(self) -> None:
        if self._tell is None:
            return
        tokens = sum(self._done.values()) + sum(self._running.values())
        # What is to come is as much longer or shorter than estimated as what was done.
        expected, found = sum(self._estimates[n] for n in self._done), sum(self._done.values())
        ratio = found / expected if expected and found else 1.0
        total = sum(self._done.values()) + sum(
            max(self._running.get(n, 0), round(ratio * estimate))
            for n, estimate in enumerate(self._estimates)
            if n not in self._done
        )
        rate = (tokens - self._before) / max(1e-9, time.monotonic() - self._began)
        left = max(0, total - tokens) / rate if rate else None
        self._tell(Progress(tokens, total, rate, left, len(self._done), len(self._estimates)))


class Task(NamedTuple):
    """What a process needs to compute any shard of a survey.

    Attributes:
        folder: of the survey.
        model: a reader that no name stands for; None where the manifest's name does.
        trust_remote_code: as in ``regard.hf.load``.
    """

    folder: str
    model: Reader | None = None
    trust_remote_code: bool = False


def compute(task: Task, number: int, progress: Callable[[int], object] | None = None) -> int:
    """Computes a shard where it is missing, and gives its tokens: what every engine maps over.

    Raises:
        IndexError: no such shard.
        SurveyError: a file or a model that is not what it was when the survey began.
    """
    folder = Path(task.folder)
    manifest = Manifest.load(folder)
    if not 0 <= number < len(manifest.shards):
        raise IndexError(
            f"survey: there is no shard {number}; there are {len(manifest.shards)}, 0 to"
            f" {len(manifest.shards) - 1}."
        )
    path = file_of(folder, number)
    if not path.exists():
        reader = None
        if manifest.model["name"] != NO_MODEL:
            reader = task.model or loaded(manifest.model["name"], task.trust_remote_code)
            _require_model(manifest, reader)
        with threads(manifest.settings["threads"]):
            write_shard(folder, manifest, number, reader, progress or (lambda tokens: None))
    return read_facts(path).tokens


def _require_model(manifest: Manifest, reader: Reader) -> None:
    for what, found in zip(("weights", "tokenizer"), reader.sha256):
        if found != manifest.model[what]:
            raise SurveyError(
                f"{manifest.model['name']}: its {what} are not those that the survey began with."
                " Put the old model back, or begin another survey in another folder."
            )


def sweep(folder: Path) -> None:
    """Removes what processes that were killed long ago have left unfinished."""
    for path in folder.glob("*/.regard-*.tmp"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > OLD_SECONDS:
                path.unlink()


def run_here(task: Task, numbers: Sequence[int], meter: Meter) -> None:
    """One shard after the other, in this process; one that fails does not stop the others.

    Raises:
        SurveyError: shards that failed, with the reason of the first.
    """
    failed: dict[int, BaseException] = {}
    for number in numbers:

        def tell(tokens: int, number: int = number) -> None:
            meter.running(number, tokens)

        try:
            meter.finished(number, compute(task, number, tell))
        except Exception as error:
            meter.failed(number)
            failed[number] = error
    _require_none(failed)


def run_on(task: Task, numbers: Sequence[int], executor: Executor, meter: Meter) -> None:
    """On anyone's executor; a shard that fails does not stop the others.

    Raises:
        SurveyError: shards that failed, with the reason of the first.
        TypeError: it gives futures of another kind.
    """
    futures: dict[Future[int], int] = {}
    failed: dict[int, BaseException] = {}
    try:
        for number in numbers:
            futures[_submitted(executor, task, number)] = number
        for future in _as_completed(futures):
            number = futures[future]
            if future.cancelled():
                failed[number] = SurveyError("its executor cancelled it.")
                meter.failed(number)
            elif (error := future.exception()) is not None:
                failed[number] = error
                meter.failed(number)
            else:
                meter.finished(number, future.result())
    except BaseException:
        for future in futures:
            future.cancel()
        raise
    _require_none(failed)


def _submitted(executor: Executor, task: Task, number: int) -> Future[int]:
    future: Any = executor.submit(compute, task, number)
    if isinstance(future, Future):
        return future
    if callable(getattr(future, "cancel", None)):
        future.cancel()
    raise TypeError(
        f"survey: executor is {a_type(executor)}, whose submit gives {a_type(future)}; one that"
        " gives a concurrent.futures.Future is needed. Other engines map over survey.run_shard."
    )


def _as_completed(futures: dict[Future[int], int]) -> Iterator[Future[int]]:
    """Polled, so that Ctrl-C is heard with every executor."""
    left = set(futures)
    while left:
        done = {future for future in left if future.done()}
        yield from sorted(done, key=lambda future: futures[future])
        left -= done
        if left and not done:
            concurrent.futures.wait(left, POLL_SECONDS, concurrent.futures.FIRST_COMPLETED)


def _require_none(failed: dict[int, BaseException]) -> None:
    if not failed:
        return
    first = min(failed)
    named = ", ".join(map(str, sorted(failed)))
    raise SurveyError(
        f"survey: {'shard' if len(failed) == 1 else 'shards'} {named} could not be computed:"
        f" {_told(failed[first])} The others are done, or the same call computes them."
    ) from failed[first]


def _told(error: BaseException) -> str:
    if isinstance(error, OSError) and error.filename is not None:  # as of a full disk
        return f"{error.filename}: {error.strerror}."
    return str(error) if isinstance(error, SurveyError) else f"{type(error).__name__}: {error}"


# In a worker: whether to stop, and 1 and the tokens of each shard that has begun; shared, without
# a lock that a killed worker could keep.
_shared: Any = None


class _StoppedError(Exception):
    """The driver wants to end."""


def _begin_worker(shared: Any) -> None:
    global _shared
    _shared = shared
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver hears Ctrl-C, and tells
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:  # a worker whose driver was killed would wait for ever
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _work(task: Task, number: int) -> int:
    def tell(tokens: int) -> None:
        if _shared[0]:
            raise _StoppedError
        _shared[1 + number] = 1 + tokens  # 0: it has not begun

    tell(0)
    return compute(task, number, tell)


def run_in_processes(
    task: Task, numbers: Sequence[int], workers: int, shards: int, meter: Meter
) -> None:
    """In processes of this machine; where one ends, its shard is tried again, at most twice.

    Raises:
        SurveyError: shards that failed, or ended their process three times.
    """
    left, tries, failed = list(numbers), Counter[int](), dict[int, BaseException]()
    unborn = 0  # pools that ended before any shard had begun
    while left:
        suspects = [number for number in left if tries[number]]
        # One after the other in one process, so that each answers for itself alone.
        batch, count = (suspects, 1) if suspects else (left, min(workers, len(left)))
        shared = multiprocessing.get_context("spawn").RawArray("q", 1 + shards)
        broken = _one_pool(task, batch, count, shared, meter, failed)
        folder = Path(task.folder)
        undone = [n for n in left if n not in failed and not file_of(folder, n).exists()]
        if broken is not None:
            _count_again(folder, left, undone, meter)
            for number in batch:
                if number in undone and shared[1 + number]:
                    tries[number] += 1
            if not any(shared[1 + number] for number in batch):  # it is no shard's doing
                unborn += 1
            for number in undone:
                if tries[number] > RETRIES:
                    failed[number] = SurveyError(
                        f"its process ended {tries[number]} times; out of memory, maybe: a machine"
                        " with more is needed, or a survey with a smaller max_tokens."
                    )
                    meter.failed(number)
        if unborn > RETRIES:
            raise SurveyError(
                "survey: its processes end as they begin. In a script, what runs a survey stands"
                ' under if __name__ == "__main__":, since each process reads the script anew;'
                " workers=1 needs no process."
            ) from broken
        left = [number for number in undone if number not in failed]
    _require_none(failed)


def _count_again(folder: Path, shards: list[int], undone: list[int], meter: Meter) -> None:
    """Of a pool that has ended: a process may have ended with its shard done, and untold."""
    for number in shards:
        if number in undone:
            meter.stopped(number)
        elif (path := file_of(folder, number)).exists():
            meter.finished(number, read_facts(path).tokens)


def _one_pool(
    task: Task, numbers: Sequence[int], workers: int, shared: Any, meter: Meter,
    failed: dict[int, BaseException],
) -> BaseException | None:  # fmt: skip
    """Runs shards until all are done or a process ends, which is given back."""
    context: Any = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, _begin_worker, (shared,))
    futures: dict[Future[int], int] = {}
    broken: BaseException | None = None
    try:
        with _interrupts_ignored(), _few_threads(workers):  # what the processes inherit
            try:
                for number in numbers:
                    futures[pool.submit(_work, task, number)] = number
            except BrokenExecutor as ended:  # one of them, already
                broken = ended
        left = set(futures)
        while left:
            done, left = concurrent.futures.wait(
                left, POLL_SECONDS, concurrent.futures.FIRST_COMPLETED
            )
            for number in (futures[future] for future in left):
                if shared[1 + number] > 1:
                    meter.running(number, shared[1 + number] - 1)
            for future in done:
                error = future.exception()
                if isinstance(error, BrokenExecutor):
                    broken = error
                elif error is not None:
                    failed[futures[future]] = error
                    meter.failed(futures[future])
                else:
                    meter.finished(futures[future], future.result())
        return broken
    except BaseException:
        shared[0] = 1
        for future in futures:
            future.cancel()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


@contextlib.contextmanager
def _interrupts_ignored() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _few_threads(workers: int) -> Iterator[None]:
    """Processes that begin in this block share the processors, where nobody has said how."""
    added = {
        name: str(max(1, processors() // workers)) for name in THREADS if name not in os.environ
    }
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def processors() -> int:
    """Those that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def make_folders(folder: Path, documents: bool) -> None:
    """The folders of the files."""
    names = [HEADS, "documents"] if documents else [HEADS]
    for name in names:
        (folder / name).mkdir(parents=True, exist_ok=True)
