"""What the documents show is what happens: README, and the examples of the docstrings."""

import doctest
import importlib
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import regard

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "regard"
README = (ROOT / "README.md").read_text(encoding="utf-8")
FLAGS = doctest.ELLIPSIS


def blocks(language):
    """The fenced blocks of a language, each with the line it starts on."""
    for match in re.finditer(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL):
        yield README.count("\n", 0, match.start()) + 2, match[1]


def test_the_first_command_stands_in_the_first_ten_lines():
    assert min(line for line, _ in [*blocks("sh"), *blocks("python")]) <= 10


def test_it_is_at_most_150_lines_long():
    assert README.count("\n") <= 150


def test_every_python_block_gives_what_it_shows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    examples = 0
    for line, code in blocks("python"):
        test = doctest.DocTestParser().get_doctest(code, names, f"README.md:{line}", None, 0)
        printed = []
        runner = doctest.DocTestRunner(optionflags=FLAGS)
        runner.run(test, out=printed.append, clear_globs=False)
        names.update(test.globs)
        assert not runner.failures, "".join(printed)
        examples += len(test.examples)
    assert examples >= 10


@pytest.mark.parametrize(("line", "block"), list(blocks("console")))
def test_every_command_prints_what_it_shows(line, block, tmp_path):
    shown = re.split(r"^\$ (.*)\n", block, flags=re.MULTILINE)[1:]
    assert shown
    for command, output in zip(shown[::2], shown[1::2], strict=True):
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        result = subprocess.run(
            ["bash", "-c", command],
            cwd=tmp_path,
            env={**os.environ, "PATH": path, "COLUMNS": "100", "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
        )
        printed = "\n".join(line.rstrip() for line in result.stdout.splitlines()) + "\n"
        agrees = doctest.OutputChecker().check_output(output, printed, FLAGS)
        assert agrees, f"README.md:{line}: {command}\n{printed}"


def test_its_table_has_every_option_of_attention():
    cells = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", README, re.MULTILINE)
    options = re.findall(r"\w+", " ".join(cells))
    parameters = inspect.signature(regard.attention).parameters.values()
    assert set(options) == {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_lead_to_files_that_are_there(document):
    text = (ROOT / document).read_text(encoding="utf-8")
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", text)
    assert not [link for link in links if not (ROOT / link).exists()]


MODULES = sorted(
    ".".join(("regard", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")
    for path in PACKAGE.rglob("*.py")
    if ">>> " in path.read_text(encoding="utf-8")
)


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_give_what_they_show(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(name)
    failed, tried = doctest.testmod(module, optionflags=FLAGS)
    assert tried
    assert not failed
