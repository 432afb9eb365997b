"""Prose to train on: sentences out of manuals, and nothing else of them."""

import gzip
import struct
import subprocess
import zlib
from pathlib import Path

import pytest

from manuals import (
    SOURCES,
    Source,
    is_prose,
    markup_paragraphs,
    prose,
    read,
    sword_books,
    unpacked,
    without_repetitions,
)

PAGE = """<html><head><title>The title of a page is no prose.</title></head><body>
<nav><p>You are here, in the middle of the menu.</p></nav>
<h1>A heading, however long it may be</h1>
<p>A paragraph with <code>code</code>, a <b>bold</b> word
and &lsquo;quotes&rsquo;.<p>One that was never closed, by its author.
<dl><dt>run(self, text, *, limit=None) is a signature.</dt>
<dd><p>Runs the text that it is given.</p></dd></dl>
<pre>print("this is no English, but a listing.")</pre>
<table><tr><td>Nor is a cell of a table any of it.</td></tr></table>
<p>Too short.</p></body></html>"""
SENTENCES = [
    "A paragraph with code, a bold word and 'quotes'.",
    "One that was never closed, by its author.",
    "Runs the text that it is given.",
]


def page(folder, name, text):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_of_a_page_its_sentences_are_left(tmp_path):
    page(tmp_path, "doc/a.html", PAGE)
    page(tmp_path, "doc/index.html", PAGE)
    texts = read(Source("some-doc", "MIT", ("doc/**/*.html",), "/index"), tmp_path)
    assert texts == {"doc/a.html": "\n\n".join(SENTENCES) + "\n"}


def test_a_footnote_does_not_break_its_sentence():
    osis = '<div/><w>In the beginning</w>,<note>Or, at first.</note> there was light.<div eID="1"/>'
    assert "In the beginning, there was light." in markup_paragraphs(osis)


def test_what_is_left_open_in_a_listing_ends_with_it():
    broken = "<pre><table>a cell</pre><p>After it come words again.</p>"
    assert [p for p in markup_paragraphs(broken) if p] == ["After it come words again."]


@pytest.mark.parametrize(
    ("paragraph", "answer"),
    [
        ("The child opened the small door.", True),
        ('"Who is there?" she asked, and listened.', True),
        ("(It is never done in any other way.)", True),
        ("The files are found in these places:", True),
        ("A heading has no full stop", False),
        ("One, two, three.", False),
        ("f(x, y) = {a: 1, b: 2, c: 3, d: [4, 5, 6, 7, 8, 9, 10]}.", False),
    ],
)
def test_prose_is_five_words_that_end_a_sentence(paragraph, answer):
    assert is_prose(paragraph) is answer


def test_plain_text_comes_in_paragraphs_without_its_line_breaks(tmp_path):
    text = ":hack: n.\n\n   The original meaning\n   of {it} is not known.\n\n   Nor is this.\n"
    (tmp_path / "words.txt.gz").write_bytes(gzip.compress(text.encode()))
    texts = read(Source("words", "public domain", ("*.gz",)), tmp_path)
    assert texts == {"words.txt.gz": "The original meaning of it is not known.\n"}


def test_the_books_of_a_sword_text_are_read_by_its_table(tmp_path):
    books = [b"<p>One day the boy went home.</p>", b"<p>It was late, and he was tired.</p>"]
    packed = [zlib.compress(book) for book in books]
    table = [(0, 0, 0), (0, len(packed[0]), 1), (len(packed[0]), len(packed[1]), 1)]
    (tmp_path / "ot.bzs").write_bytes(b"".join(struct.pack("<III", *row) for row in table))
    (tmp_path / "ot.bzz").write_bytes(b"".join(packed))
    assert [book.encode() for book in sword_books(tmp_path / "ot.bzz")] == books
    texts = read(Source("web", "public domain", ("*.bzz",)), tmp_path)
    assert list(texts) == ["ot.bzz/0", "ot.bzz/1"]
    assert texts["ot.bzz/1"] == "It was late, and he was tired.\n"


def test_paragraphs_come_once_and_not_at_all_where_a_held_out_text_has_them():
    texts = {
        "a": "The first is new.\n\nThe second is held out.\n",
        "b": "The first is new.\n",
        "c": "The first is new.\n\nThe third is new, too.\n",
    }
    known = ["   The *second* is\n   held   out. And more."]
    assert without_repetitions(texts, known) == {
        "a": "The first is new.\n",
        "c": "The third is new, too.\n",
    }


def package(folder, name, version, text):
    """A .deb with one page of text, by dpkg-deb."""
    root = folder / "build" / name
    page(root, "DEBIAN/control", CONTROL.format(name=name, version=version))
    page(root, f"usr/share/doc/{name}/a.html", f"<p>{text}</p>")
    try:
        command = ["dpkg-deb", "--root-owner-group", "-b", root, folder]
        subprocess.run(command, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("dpkg-deb is not installed")


CONTROL = """Package: {name}
Version: {version}
Architecture: all
Maintainer: nobody <nobody@example.org>
Description: a page
"""


def test_a_package_is_read_without_being_installed(tmp_path):
    package(tmp_path, "small-doc", "1.2-3", "The page of the package says this.")
    source = Source("small-doc", "public domain", ("usr/share/doc/*/*.html",))
    for _ in range(2):  # the second time from what was unpacked
        texts, versions = prose(tmp_path, [source])
        assert versions == {"small-doc": "1.2-3"}
        name = "small-doc/usr/share/doc/small-doc/a.html"
        assert texts == {name: "The page of the package says this.\n"}


def test_without_apt_the_error_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"`apt-get download some-doc` failed: .*apt-get") as one:
        unpacked("some-doc", tmp_path / "manuals")
    assert f"put the packages' .deb files into {tmp_path / 'manuals'}" in str(one.value)


def test_every_source_is_named_in_the_notice():
    notice = " ".join((Path(__file__).parents[2] / "NOTICE").read_text().split())
    for source in SOURCES:
        assert source.package in notice
