"""The page's modules as one, and its style sheets: for a server, an offline file and a notebook.

Each module becomes a function that is called once, after those it imports, and returns its exports;
so its names stay its own. Syntax that this does not understand is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.resources import files
from importlib.resources.abc import Traversable
from posixpath import dirname, join, normpath
from typing import NamedTuple

__all__ = ["BundleError", "bundle", "page_folder", "page_paths", "style_sheet"]

# The style sheets in their order: of two rules that are equally specific the later one holds.
SHEETS = (
    "ground", "controls", "panels", "heads", "text", "steps", "dialogs", "sizes", "lines", "map",
    "typing",
)  # fmt: skip
# Each begins with the end of a line, not with `^`, which would be tried at every character.
IMPORT = re.compile(r'\nimport\s*\{([\w$,\s]*)\}\s*from\s*"(\.\.?/[\w./-]+)\.js";[ \t]*(?=\n|\Z)')
# No `let`: importers would not see later assignments.
EXPORT = re.compile(r"\nexport (?=(?:async function|function|class|const)\*? ([\w$]+))")
EXPORT_LIST = re.compile(r"\nexport \{([\w$,\s]*)\};[ \t]*(?=\n|\Z)")
# `import` and `export` at the start of a line, and syntax that only a module has.
REFUSED = (
    re.compile(r"\n\s*(?:import|export)\b.*"),
    re.compile(r"import\s*[(.].*"),
    re.compile(r"\nawait\b.*"),
)
# Text that would end a <script> element, or hide its end.
MARKUP = re.compile(r"</?script|<!--", re.IGNORECASE)


class BundleError(ValueError):
    """A module of the page that cannot be joined with the others."""


class _Module(NamedTuple):
    code: str
    exported: tuple[str, ...]


def page_folder() -> Traversable:
    """The folder of the page's files."""
    return files("regard.viewer") / "page"


def page_paths() -> dict[str, Traversable]:
    """The page's files, those in its folders too, by their paths: ``map/frame.js``."""

    def found(folder: Traversable, above: str) -> Iterator[tuple[str, Traversable]]:
        for file in folder.iterdir():
            if file.is_dir():
                yield from found(file, f"{above}{file.name}/")
            else:
                yield above + file.name, file

    return dict(found(page_folder(), ""))


def style_sheet() -> str:
    """All style sheets of the page as one."""
    folder = page_folder() / "style"
    return "\n".join((folder / f"{name}.css").read_text(encoding="utf-8") for name in SHEETS)


def bundle(entry: str, folder: Traversable | None = None) -> str:
    """One module of ``entry`` and its imports; its exports are declared at the end.

    Args:
        entry: path of a module, ``main`` or ``map/frame``.
        folder: where the modules are; by default the page.

    Raises:
        BundleError: a ring of modules, a name that none exports, or an import or export of another
            form than ``import { a } from "../map/x.js";``, ``export`` in front of a function, class
            or constant, and a last ``export { a };``.
    """
    modules: dict[str, _Module] = {}
    _add(entry, (), page_folder() if folder is None else folder, modules)
    names = ", ".join(modules[entry].exported)
    last = f"const {{ {names} }} = {_variable(entry)};\n"
    return "".join(module.code for module in modules.values()) + last


def _add(
    name: str, above: tuple[str, ...], folder: Traversable, modules: dict[str, _Module]
) -> None:
    """Adds a module behind those that it imports."""
    if name in modules:
        return
    if name in above:
        ring = " imports ".join((*above, name))
        raise BundleError(f"page: {ring}; modules cannot stand in a ring.")
    try:
        source = "\n" + (folder / f"{name}.js").read_text(encoding="utf-8")
    except FileNotFoundError:
        raise BundleError(f"page: there is no {name}.js, which {above[-1:]} imports.") from None
    lines = []
    for names, path in IMPORT.findall(source):
        other = normpath(join(dirname(name), path))
        if other.startswith("../"):
            raise BundleError(f"page: {name} imports {path}.js, which is outside of the page.")
        _add(other, (*above, name), folder, modules)
        wanted = _names(names)
        if missing := set(wanted) - set(modules[other].exported):
            raise BundleError(f"page: {name} imports {sorted(missing)}, none of {other}'s exports.")
        lines.append(f"const {{ {', '.join(wanted)} }} = {_variable(other)};\n")
    exported = EXPORT.findall(source)
    for names in EXPORT_LIST.findall(source):
        exported += _names(names)
    body = EXPORT_LIST.sub("", EXPORT.sub("\n", IMPORT.sub("", source))).strip()
    _check(name, body)
    code = (
        f"const {_variable(name)} = (() => {{\n{''.join(lines)}{body}\n"
        f"return {{ {', '.join(exported)} }};\n}})();\n"
    )
    modules[name] = _Module(code, tuple(exported))


def _variable(name: str) -> str:
    return f"$module_{name.replace('-', '_').replace('/', '$')}"


def _names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _check(name: str, body: str) -> None:
    for pattern in REFUSED:
        if found := pattern.search(f"\n{body}"):
            raise BundleError(
                f"page: {name}: {found[0].strip()!r} is in no form that can be joined."
            )
    if found := MARKUP.search(body):
        raise BundleError(f"page: {name} has {found[0]!r}, which an inline script cannot hold.")
