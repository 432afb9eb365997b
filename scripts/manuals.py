"""English prose to train on: manuals and books of Debian whose licences allow a model of them.

``prose`` downloads the packages of ``SOURCES`` with apt, unpacks them without installing them, and
keeps their sentences: no navigation, headings, tables, signatures or listings.
"""

from __future__ import annotations

import dataclasses
import gzip
import re
import shutil
import struct
import subprocess
import zlib
from collections.abc import Iterable, Iterator, Mapping
from html.parser import HTMLParser
from pathlib import Path

BLOCKS = re.compile(
    "p|div|li|ul|ol|dl|dt|dd|blockquote|section|article|main|body|br|hr|h[1-6]|chapter|lg"
)
LEFT_OUT = re.compile("head|title|script|style|nav|header|footer|table|pre|dt|aside|svg|note")
INLINE = {"note"}  # a footnote does not end the sentence that it is in
# Whatever else is on a page, a paragraph of prose is at least five words and ends a sentence.
WORDS = re.compile(r"[A-Za-z][A-Za-z'’-]*")
SENTENCES = re.compile(r".*[.?!:][\"'”’)\]]*", re.DOTALL)
LEAST_WORDS = 5
# Straight quotes are what people type.
STRAIGHT = str.maketrans({"‘": "'", "’": "'", "“": '"', "”": '"', "\u00a0": " "})


@dataclasses.dataclass(frozen=True)
class Source:
    """A package of Debian and what is read of it.

    Attributes:
        package: its name.
        licence: of the files that are read.
        files: patterns below the package's root; HTML, or plain text, or SWORD's books (``.bzz``).
        but: what a path must not contain.
    """

    package: str
    licence: str
    files: tuple[str, ...]
    but: str = "^$"


SOURCES = (
    Source(
        "python3.11-doc",
        "Python Software Foundation License Version 2",
        tuple(
            f"usr/share/doc/python3.11/html/{part}/**/*.html"
            for part in ("tutorial", "library", "reference", "howto", "faq", "using")
        ),
    ),
    Source(  # the embedded-book's prose is under CC-BY-SA
        "rust-doc",
        "Apache License 2.0 or MIT",
        ("usr/share/doc/rust-doc/html/book/**/*.html",),
        r"/print\.html",
    ),
    Source("jargon-text", "public domain", ("usr/share/doc/jargon-text/jargon.txt.gz",)),
    Source("sword-text-web", "public domain", ("usr/share/sword/modules/texts/ztext/*/*.bzz",)),
)


def prose(
    folder: str | Path, sources: Iterable[Source] = SOURCES
) -> tuple[dict[str, str], dict[str, str]]:
    """The texts of all sources, named ``package/path``, and the version of every package.

    Args:
        folder: keeps the packages; what is there is not downloaded again.

    Raises:
        RuntimeError: a package that apt does not give.
    """
    texts, versions = {}, {}
    for source in sources:
        versions[source.package], root = unpacked(source.package, Path(folder))
        for name, text in read(source, root).items():
            texts[f"{source.package}/{name}"] = text
    return texts, versions


def unpacked(package: str, folder: Path) -> tuple[str, Path]:
    """Version of a package and the folder with its files."""
    folder.mkdir(parents=True, exist_ok=True)
    archives = sorted(folder.glob(f"{package}_*.deb"))
    if not archives:
        _tool(["apt-get", "download", package], folder)
        archives = sorted(folder.glob(f"{package}_*.deb"))
    root = folder / archives[-1].stem
    if not root.exists():
        partial = root.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        _tool(["dpkg-deb", "-x", archives[-1].name, partial.name], folder)
        partial.rename(root)
    return _tool(["dpkg-deb", "-f", archives[-1].name, "Version"], folder).strip(), root


def _tool(command: list[str], folder: Path) -> str:
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", "") or error
        raise RuntimeError(
            f"`{' '.join(command)}` failed: {str(reason).strip()}\n"
            "  The manuals are packages of Debian 12: run this there, after `apt-get update`, or "
            f"put the packages' .deb files into {folder}."
        ) from error
    return done.stdout


def read(source: Source, root: Path) -> dict[str, str]:
    """Paragraphs of prose of every file, by path, in the order of the paths; none is empty."""
    paths = sorted(
        {path for pattern in source.files for path in root.glob(pattern) if path.is_file()}
    )
    texts = {}
    for path in paths:
        name = path.relative_to(root).as_posix()
        if re.search(source.but, f"/{name}"):
            continue
        for part, paragraphs in _parts(path):
            kept = [tidy for one in paragraphs if is_prose(tidy := " ".join(one.split()))]
            if kept:
                texts[name + part] = "\n\n".join(kept).translate(STRAIGHT) + "\n"
    return texts


def is_prose(paragraph: str) -> bool:
    """Whether a paragraph is made of sentences: not a heading, a signature or a menu."""
    words = WORDS.findall(paragraph)
    return (
        len(words) >= LEAST_WORDS
        and SENTENCES.fullmatch(paragraph) is not None
        and sum(map(len, words)) > 0.6 * len(paragraph)
    )


def without_repetitions(texts: Mapping[str, str], known: Iterable[str] = ()) -> dict[str, str]:
    """The texts without paragraphs that one before has, or that a text of ``known`` contains.

    Args:
        texts: paragraphs, an empty line between two.
        known: compared by letters alone, so that markup and line breaks do not matter.
    """
    letters = "\0".join(_letters(text) for text in known)
    seen: set[str] = set()
    kept = {}
    for name, text in texts.items():
        paragraphs = []
        for paragraph in text.rstrip("\n").split("\n\n"):
            key = _letters(paragraph)
            if key not in seen and key not in letters:
                paragraphs.append(paragraph)
            seen.add(key)
        if paragraphs:
            kept[name] = "\n\n".join(paragraphs) + "\n"
    return kept


def _letters(text: str) -> str:
    return re.sub(r"[^a-z]", "", text.lower())


def _parts(path: Path) -> Iterator[tuple[str, list[str]]]:
    if path.suffix == ".bzz":
        for number, book in enumerate(sword_books(path)):
            yield f"/{number}", markup_paragraphs(book)
    elif path.suffix == ".html":
        yield "", markup_paragraphs(path.read_text("utf-8", errors="replace"))
    else:
        text = gzip.decompress(path.read_bytes()).decode("utf-8", errors="replace")
        # The Jargon File marks cross references with braces and entries with colons.
        yield "", re.split(r"\n\s*\n", re.sub(r"[{}]", "", text))


def sword_books(path: Path) -> Iterator[str]:
    """The books of a compressed SWORD text: offset, size and length of each are in its ``.bzs``."""
    data, table = path.read_bytes(), path.with_suffix(".bzs").read_bytes()
    for offset, size, _ in struct.iter_unpack("<III", table):
        if size:
            yield zlib.decompress(data[offset : offset + size]).decode("utf-8", errors="replace")


def markup_paragraphs(markup: str) -> list[str]:
    """The paragraphs of HTML or OSIS, as they are broken by its blocks."""
    parser = _Paragraphs()
    parser.feed(markup)
    parser.close()
    return [*parser.paragraphs, "".join(parser.open)]


class _Paragraphs(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.paragraphs: list[str] = []
        self.open: list[str] = []
        self.skipped: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if LEFT_OUT.fullmatch(tag):
            self.skipped.append(tag)
        elif BLOCKS.fullmatch(tag):
            self._end()

    def handle_endtag(self, tag: str) -> None:
        if tag in self.skipped:  # closes what was left open within, too
            del self.skipped[self.skipped.index(tag) :]
        ends = BLOCKS.fullmatch(tag) or LEFT_OUT.fullmatch(tag)
        if ends and tag not in INLINE:
            self._end()

    def handle_data(self, data: str) -> None:
        if not self.skipped:
            self.open.append(data)

    def _end(self) -> None:
        self.paragraphs.append("".join(self.open))
        self.open.clear()
