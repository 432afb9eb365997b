"""``Survey``: what every head of a model does, over a corpus."""

from __future__ import annotations

import bisect
import contextlib
import functools
import warnings
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any

import numpy as np

from regard._base.errors import a_type
from regard._base.types import Float
from regard._call.checks import read_flag
from regard.heads import HeadScores
from regard.lm import LanguageModel
from regard.recording import Recording
from regard.survey import _run
from regard.survey._corpus import RECORDING, Source, cut, documents, found_files
from regard.survey._manifest import NAME, REST, Manifest, versions
from regard.survey._models import BUILTIN, NO_MODEL, Own, Reader, is_own, loaded
from regard.survey._run import Meter, Progress, Task
from regard.survey._shard import Facts, file_of, names_of, read_facts, read_sums
from regard.survey._statistics import spacing
from regard.survey._sums import HeadSums

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

SHARDS = 24  # of a small corpus, at least
MAX_TOKENS = 1024
MOST = 2**40  # of a setting
USUAL: dict[str, Any] = {"column": "text", "documents": False, "threads": 1}


class Survey:
    """What every head of a model does over a corpus: a folder of sums, shard by shard.

    With a corpus it begins a survey in the folder, or goes on with the one that is there; without
    one it opens that. A shard's file is a pure function of the manifest, ``survey.json``, and the
    shard's number, and a shard is done if its file is there: nothing else is state.

    Args:
        folder: of the survey.
        model: ``"builtin"``, a folder, a name of Hugging Face, or a ``LanguageModel``; by default
            the built-in one. Recordings need none.
        corpus: files, folders and patterns: texts in UTF-8, ``.jsonl`` and ``.parquet`` with a
            document in each row, or ``.safetensors`` recordings.
        max_tokens: that are read of each document, from its beginning; the rest is left out. Of
            recordings all is read.
        shard_tokens: about how many a shard has; by default a million, or a 24th of the corpus
            where that is less.
        column: of the text, in files of rows; by default ``"text"``.
        documents: also write the sums of every document, into ``documents/``; by default not.
        threads: of the products of a model, whose last bits depend on it; by default 1.
        trust_remote_code: as in ``regard.hf.load``.

    Raises:
        FileNotFoundError: no such file or model, or without a corpus no survey in the folder.
        TypeError: a value of a wrong type.
        ModuleNotFoundError: pyarrow is not installed; ``pip install "regard[survey]"`` brings it.
        ValueError: another survey is in the folder, which the error names; nothing to read, texts
            beside recordings, an empty name, or numbers below 1 or above 2**40; without a corpus,
            settings that the survey in the folder does not have.

    Example:
        >>> import regard, tempfile, pathlib
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> _ = (folder / "a.txt").write_text("the cat sat on the mat " * 9)
        >>> survey = regard.survey.Survey(folder / "heads", corpus=folder / "a.txt")
        >>> survey.run(workers=1)
        >>> survey.heads()
        HeadSums(32 heads over 1 document, 65 tokens)

    Source: docs/survey.md.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        model: str | Path | LanguageModel | None = None,
        corpus: str | Path | Iterable[str | Path] | None = None,
        max_tokens: int | None = None,
        shard_tokens: int | None = None,
        column: str | None = None,
        documents: bool | None = None,
        threads: int | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        _require_name("folder", folder, (str, Path), "a path")
        is_name = (str, Path, LanguageModel, NoneType)
        _require_name("model", model, is_name, "a name, a folder or a LanguageModel")
        self.folder = Path(folder).resolve()
        numbers = {"max_tokens": max_tokens, "shard_tokens": shard_tokens, "threads": threads}
        for name, value in numbers.items():
            if value is None:
                continue
            _require_int(name, value)
            if value < 1:
                raise ValueError(f"survey: {name} is {value}; at least 1 is needed.")
            if value > MOST:
                raise ValueError(
                    f"survey: {name} is {value}; at most 2**40 is possible, more than any text has."
                )
        _require("documents", documents, (bool, NoneType), "True or False")
        trust_remote_code = read_flag("trust_remote_code", trust_remote_code, "survey")
        _require("column", column, (str, NoneType), "a str")
        max_tokens = None if max_tokens is None else int(max_tokens)  # NumPy's is no JSON
        threads = None if threads is None else int(threads)
        asked = {"column": column, "documents": documents, "threads": threads}
        given = {name: x for name, x in asked.items() if x is not None}
        own = Own(model) if isinstance(model, LanguageModel) else None
        self._task = Task(str(self.folder), own, trust_remote_code)
        if corpus is None:
            self.manifest = Manifest.load(self.folder)
            if shard_tokens is not None:
                raise ValueError(
                    "survey: shard_tokens has no meaning without a corpus: the survey has its"
                    " shards already. Leave it out."
                )
            if max_tokens is not None:
                given["max_tokens"] = max_tokens
            self._require_begun_with(given, model)
            return
        paths = "a path or a list of paths"
        _require("corpus", corpus, (str, Path, Iterable), paths)
        named = [corpus] if isinstance(corpus, (str, bytes, Path)) else [*corpus]
        for path in named:
            _require_name("corpus", path, (str, Path), paths)
        files, left_out = found_files(named, self.folder)
        name = _name_of(model, files)
        most, facts = max_tokens or MAX_TOKENS, {"name": name}
        if name != NO_MODEL:
            reader: Reader = own or loaded(name, trust_remote_code)
            most = _longest(reader, max_tokens)
            if unseen := reader.unseen:
                are = f"and {len(unseen) - 1} more are" if unseen[1:] else "is"
                warnings.warn(
                    f"survey: {unseen[0]} {are} left out: attention that {name} computes by"
                    " itself, of which nothing is seen.",
                    stacklevel=2,
                )
            facts |= dict(zip(("weights", "tokenizer"), reader.sha256))
        settings: dict[str, Any] = {
            "max_tokens": most, "rest": REST, "every": spacing(most), **USUAL, **given,
        }  # fmt: skip
        shards = cut(files, left_out, settings["column"], most, shard_tokens, SHARDS)
        self.manifest = self._begin(
            Manifest(
                versions=versions(*(() if name == NO_MODEL or own or is_own(name) else HF)),
                model=facts,
                settings=settings,
                shards=tuple(map(tuple, shards)),
            )
        )

    def _begin(self, asked: Manifest) -> Manifest:
        """The manifest of the folder, after it was written or compared."""
        if not (self.folder / NAME).exists():
            if self.folder.exists() and not self.folder.is_dir():
                raise ValueError(f"survey: {self.folder} is a file; name a folder.")
            _run.make_folders(self.folder, asked.settings["documents"])
            with contextlib.suppress(FileExistsError):  # another has begun meanwhile
                asked.save(self.folder)
                return asked
        Manifest.load(self.folder).require_same(asked, self.folder)
        return asked

    def _require_begun_with(
        self, settings: Mapping[str, Any], model: str | Path | LanguageModel | None
    ) -> None:
        """Raises where a survey that is opened has not the settings or the model asked for."""
        found = {"model": self.manifest.model["name"], **self.manifest.settings}
        asked = {**settings}
        if model is not None and not isinstance(model, LanguageModel):
            asked["model"] = _name_of(model, [])
        for name, x in asked.items():
            if x != found[name]:
                raise ValueError(
                    f"survey: {self.folder} has another survey: it has {name} {found[name]}, and"
                    f" {x} is asked for. Leave {name} out, or begin a survey in another folder."
                )

    def __len__(self) -> int:
        """How many shards there are."""
        return len(self.manifest.shards)

    def __repr__(self) -> str:
        done = len(self) - len(self.missing())
        model = self.manifest.model["name"]
        return f"Survey({str(self.folder)!r}, {model}, shards: {done} of {len(self)})"

    def missing(self) -> list[int]:
        """Numbers of the shards that have no file."""
        done = {*names_of(self.folder)}
        return [number for number in range(len(self)) if number not in done]

    def run_shard(self, number: int, progress: Callable[[int], object] | None = None) -> None:
        """Computes one shard, in this process, if it is missing: what an engine maps over.

        The file is the same bits wherever it is computed, with the same packages and the same kind
        of processor.

        Args:
            number: from 0 on.
            progress: called with the tokens of the shard that are done.

        Raises:
            IndexError: no such shard.
            TypeError: no int.
            SurveyError: a file of the corpus, or the model, is not what it was.
        """
        _require_int("shard", number)
        _run.make_folders(self.folder, self.manifest.settings["documents"])
        _run.compute(self._task, number, progress)

    def run(
        self,
        executor: Executor | None = None,
        *,
        workers: int | None = None,
        shards: Iterable[int] | None = None,
        progress: Callable[[Progress], object] | None = None,
    ) -> None:
        """Computes all missing shards.

        By default in processes of this machine. Where one of them ends, its shard is tried again,
        at most twice. Ctrl-C leaves whole shards, and the same call goes on.

        Args:
            executor: any ``concurrent.futures.Executor``, as of Dask, MPI or loky, on machines that
                see the folder and the corpus under the same names.
            workers: how many processes; 1 computes in this one. By default as many as processors,
                or as many as their threads fit in.
            shards: numbers of those to compute, by default all.
            progress: is told how far it is.

        Raises:
            IndexError: no such shard.
            SurveyError: shards that failed, with the reason; all others are done.
            TypeError: ``workers`` or a shard is no int, or ``executor`` takes no work.
            ValueError: ``workers`` below 1, or more than one process for a ``LanguageModel``, which
                no name stands for; a file in the place of a shard is damaged, or none of this
                survey.
        """
        wanted = {*range(len(self))} if shards is None else {*_numbers(shards)}
        if beyond := [number for number in wanted if not 0 <= number < len(self)]:
            raise IndexError(
                f"survey: there is no shard {min(beyond)}; there are {len(self)}, 0 to"
                f" {len(self) - 1}."
            )
        _require_executor(executor)
        if workers is not None:
            _require_int("workers", workers)
            if workers < 1:
                raise ValueError(f"survey: workers is {workers}; at least 1 is needed.")
            if workers > 1 and executor is None and self._task.model is not None:
                raise ValueError(
                    f"survey: workers is {workers}, and a LanguageModel computes in this process"
                    " alone. Leave workers out, or save the model and name its folder."
                )
        facts = self.facts()  # a damaged file is told before anything is computed
        missing = [number for number in self.missing() if number in wanted]
        _run.make_folders(self.folder, self.manifest.settings["documents"])
        _run.sweep(self.folder)
        meter = self._meter(wanted, facts, progress)
        if executor is not None:
            _run.run_on(self._task, missing, executor, meter)
            return
        fit = max(1, _run.processors() // self.manifest.settings["threads"])
        count = min(workers or fit, len(missing))
        if count <= 1 or self._task.model is not None:
            _run.run_here(self._task, missing, meter)
            return
        _run.run_in_processes(self._task, missing, count, len(self), meter)

    def _meter(
        self,
        wanted: set[int],
        facts: Mapping[int, Facts],
        progress: Callable[[Progress], object] | None,
    ) -> Meter:
        """Of the shards that this run is about, where some are done."""
        if progress is None:
            return Meter([0] * len(self), {}, None)
        done = {number: found.tokens for number, found in facts.items()}
        estimates = [
            sum(source.tokens for source in shard) if number in wanted or number in done else 0
            for number, shard in enumerate(self.manifest.shards)
        ]
        return Meter(estimates, done, progress)

    def facts(self) -> dict[int, Facts]:
        """What every shard that is done says of its documents: counted, cut, empty, unreadable.

        Raises:
            ValueError: a file that is none of this survey.
        """
        found = {number: read_facts(file_of(self.folder, number)) for number in self._done()}
        for number, facts in found.items():
            of = "survey" if facts.manifest != self.manifest.sha256 else "shard"
            if of == "survey" or facts.shard != number:
                raise ValueError(
                    f"survey: {file_of(self.folder, number)} is of another {of}. Remove it, and"
                    " the same command computes it."
                )
        return found

    def _done(self) -> list[int]:
        return [number for number in names_of(self.folder) if number < len(self)]

    def heads(self) -> HeadSums:
        """The sums of all shards that are done.

        Raises:
            ValueError: as ``facts``.
        """
        self.facts()
        return sum((read_sums(file_of(self.folder, number)) for number in self._done()), start=NONE)

    def means(self) -> HeadScores:
        """``heads().means()``: roles and scores of every head."""
        return self.heads().means()

    def quantile(self, statistic: str, p: float) -> Float[NDArray[np.float64], "layers heads"]:
        """``heads().quantile(statistic, p)``."""
        return self.heads().quantile(statistic, p)

    def plot(self) -> Figure:
        """``heads().plot()``: a picture of all heads."""
        return self.heads().plot()

    def document(self, number: int) -> str:
        """The name of a document: its file, and in a file of rows its row, from 1 on.

        Raises:
            IndexError: no such document.
        """
        source = self._source_of(number)
        return source.name(number - source.first)

    def text(self, number: int) -> str | Recording[Any] | None:
        """A document itself: its text, or its recording; None where it cannot be read.

        Raises:
            IndexError: no such document.
            SurveyError: its file is not what it was.
        """
        for read in documents(self._source_of(number), self.manifest.settings["column"]):
            if read.number == number:
                return read.text if read.recording is None else read.recording
        return None

    def _source_of(self, number: int) -> Source:
        _require_int("document", number)
        at = bisect.bisect(self._starts, number) - 1
        if at < 0 or number - self._sources[at].first >= self._sources[at].rows[1]:
            raise IndexError(f"survey: there is no document {number}.")
        return self._sources[at]

    @functools.cached_property
    def _sources(self) -> list[Source]:
        """Those of all shards, in the order of their documents' numbers."""
        return [source for shard in self.manifest.shards for source in shard]

    @functools.cached_property
    def _starts(self) -> list[int]:
        """Number of the first document of each source."""
        return [source.first + source.rows[0] for source in self._sources]


def _require(name: str, value: object, types: Any, needed: str) -> None:
    if not isinstance(value, types):
        raise TypeError(f"survey: {name} is {a_type(value)}; {needed} is needed.")


def _require_name(name: str, value: object, types: Any, needed: str) -> None:
    _require(name, value, types, needed)
    if isinstance(value, str) and not value.strip():
        raise ValueError(f"survey: {name} is an empty name; {needed} is needed.")


def _require_int(name: str, value: object) -> None:
    if isinstance(value, bool):
        raise TypeError(f"survey: {name} is a bool; an int is needed.")
    _require(name, value, (int, np.integer), "an int")


def _require_executor(value: object) -> None:
    """Raises TypeError for what takes no work: a class does not, before one is made of it."""
    is_class = isinstance(value, type)
    is_client = not isinstance(value, (type, Executor)) and callable(
        getattr(value, "get_executor", None)
    )
    takes_work = not is_class and callable(getattr(value, "submit", None))
    if value is None or (takes_work and not is_client):
        return
    found = f"the class {value.__name__}" if isinstance(value, type) else a_type(value)
    way_out = (
        "which its get_executor() makes"
        if is_client
        else "as ThreadPoolExecutor() makes one, or workers=... for processes of this machine"
    )
    raise TypeError(
        f"survey: executor is {found}; a concurrent.futures.Executor is needed, {way_out}."
    )


def _numbers(shards: Iterable[int]) -> Iterable[int]:
    """Those of shards, checked."""
    if not isinstance(shards, Iterable):
        raise TypeError(
            f"survey: shards is {a_type(shards)}; a list of ints is needed: [{shards}]."
        )
    for number in shards:
        _require_int("shard", number)
        yield number


NONE = HeadSums.of_nothing()
HF = ("torch", "transformers")


def _name_of(model: str | Path | LanguageModel | None, files: list[Path]) -> str:
    """What the manifest calls the model."""
    from regard.survey._corpus import KINDS

    recordings = [file for file in files if KINDS.get(file.suffix.lower()) == RECORDING]
    if recordings and len(recordings) < len(files):
        text = next(file for file in files if file not in {*recordings})
        raise ValueError(
            f"survey: {recordings[0]} is a recording, and {text} a text; survey either, each into a"
            " folder of its own."
        )
    if recordings:
        if model is not None:
            raise ValueError("survey: recordings were made by a model; leave the model out.")
        return NO_MODEL
    if isinstance(model, LanguageModel):
        return model.name or "a model without a name"
    name = BUILTIN if model is None else str(model)
    return str(Path(name).resolve()) if Path(name).is_dir() and name != BUILTIN else name


def _longest(reader: Reader, max_tokens: int | None) -> int:
    """How many tokens are read of a document, at most."""
    longest = reader.longest
    if max_tokens is None:
        return min(MAX_TOKENS, longest or MAX_TOKENS)
    if longest is not None and max_tokens > longest:
        raise ValueError(
            f"survey: max_tokens is {max_tokens:,}; the model reads at most {longest:,}."
        )
    return max_tokens
