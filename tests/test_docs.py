"""The pages of docs/ and the site that `./check docs` builds of them."""

import doctest
import inspect
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

import regard
import regard.distributed
import regard.lm
import regard.nn
import regard.recording
import regard.survey
import regard.testing
import regard.viewer

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [
    "index.md", "coming-from.md", "attention.md", "parts.md", "huggingface.md", "watch.md",
]  # fmt: skip
pytestmark = pytest.mark.xdist_group("docs")  # one site serves several of the tests


@pytest.mark.parametrize("page", PAGES)
def test_the_examples_of_a_page_give_what_they_show(page):
    failed, tried = doctest.testfile(str(DOCS / page), module_relative=False)
    assert tried
    assert not failed


def test_coming_from_elsewhere_has_every_option_of_attention():
    text = (DOCS / "coming-from.md").read_text(encoding="utf-8")
    first = " ".join(re.findall(r"^\| (.*?) \|", text, re.MULTILINE))
    parameters = inspect.signature(regard.attention).parameters.values()
    options = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
    assert options <= {*re.findall(r"\w+", " ".join(re.findall(r"`(.*?)`", first)))}


def test_the_table_of_extras_is_that_of_the_package():
    from tomllib import loads

    project = loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    text = (DOCS / "install.md").read_text(encoding="utf-8")
    named = re.findall(r"^\| `regard\[(\w+)\]`", text, re.MULTILINE)
    extras = project["optional-dependencies"]
    assert sorted(named) == sorted(extras)
    for name, brings in re.findall(r"^\| `regard\[(\w+)\]` \| ([^|]*) \|", text, re.MULTILINE):
        if not brings.startswith("all of these"):
            packages = [re.match(r"[\w-]+", needed)[0] for needed in extras[name]]
            assert brings.split(", ") == packages, name


def test_the_glossary_of_the_kernels_names_what_is_in_their_sources():
    text = (DOCS / "kernels.md").read_text(encoding="utf-8")
    named = re.findall(r"((?:`\w+`(?:, | and )?)+) \(`([\w-]+\.(?:h|cpp))`", text)
    assert len(named) > 20
    for names, source in named:
        words = set(re.findall(r"\w+", (ROOT / "kernels" / source).read_text(encoding="utf-8")))
        assert set(re.findall(r"`(\w+)`", names)) <= words, source


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built site; a broken link, a page that is in no menu or a name that is not there fail."""
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1", **NO_NETWORK},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert built.returncode == 0, built.stderr
    return folder


# A proxy where nothing listens: whatever asks for something elsewhere fails.
NO_NETWORK = dict.fromkeys(("http_proxy", "https_proxy", "all_proxy"), "http://127.0.0.1:9")


class Loaded(HTMLParser):
    """Addresses that a page loads by itself, and the ids on it."""

    def __init__(self, text):
        super().__init__()
        self.addresses, self.ids = [], set()
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.ids.add(attributes.get("id"))
        self.addresses.append(attributes.get("src"))
        if tag == "link" and attributes.get("rel") not in ("canonical", "next", "prev"):
            self.addresses.append(attributes.get("href"))


def test_the_site_loads_nothing_from_elsewhere(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 20
    for page in pages:
        loaded = Loaded(page.read_text(encoding="utf-8")).addresses
        assert not [a for a in loaded if a and re.match(r"(https?:)?//", a)], page
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import )[\"']?(https?:)?//", sheet.read_text()), sheet


def test_the_site_has_every_public_name(site):
    ids = set()
    for page in (site / "api").rglob("*.html"):
        ids |= Loaded(page.read_text(encoding="utf-8")).ids
    names = [f"regard.{name}" for name in regard.__all__]
    modules = (
        regard.distributed, regard.lm, regard.nn, regard.recording, regard.survey, regard.testing,
        regard.viewer,
    )  # fmt: skip
    for module in modules:
        names += [f"{module.__name__}.{name}" for name in module.__all__]
    top = {"regard.recording.Layer", "regard.recording.Recording"}  # under regard.Layer, ...
    assert not {*names} - top - ids


def test_the_search_finds_the_api(site):
    index = (site / "search" / "search_index.json").read_text(encoding="utf-8")
    assert "scaled_dot_product_attention" in index
