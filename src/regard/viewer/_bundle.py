"""The page's modules as one: for a file that is opened offline, and for a notebook.

Modules are written one behind the other, each after those it imports, without their imports and
exports. That keeps their meaning where nothing is renamed and every name at the top is unique;
whatever this module does not understand, it refuses.
"""

from __future__ import annotations

import re
from importlib.resources import files
from importlib.resources.abc import Traversable

__all__ = ["BundleError", "bundle", "page_folder"]

IMPORT = re.compile(r'^import\s*\{([\w$,\s]*)\}\s*from\s*"\./([\w-]+\.js)";[ \t]*$', re.MULTILINE)
EXPORTED = re.compile(r"^export (?=(?:async function|function|class|const|let)\b)", re.MULTILINE)
EXPORT_LIST = re.compile(r"^export \{([\w$,\s]*)\};[ \t]*$", re.MULTILINE)
# `import` and `export` at the start of a line, and what only a module by itself has.
REFUSED = re.compile(r"^\s*(?:import|export)\b.*|\bimport\s*[(.].*", re.MULTILINE)
DECLARED = re.compile(
    r"^(?:async )?(?:function\*?|class|const|let|var)\s+([\w$]+|[{\[][^=]*[}\]](?=\s*=))",
    re.MULTILINE,
)
# What would end a <script> element, or hide its end.
MARKUP = re.compile(r"</?script|<!--", re.IGNORECASE)


class BundleError(ValueError):
    """A module of the page that cannot be joined with the others."""


def page_folder() -> Traversable:
    """The folder of the page's files."""
    return files("regard.viewer") / "page"


def bundle(entry: str, folder: Traversable | None = None) -> str:
    """One module with everything that ``entry`` needs; what it declares is at its top.

    Args:
        entry: name of a module, ``main.js``.
        folder: where the modules are; by default the page.

    Raises:
        BundleError: a cycle, a name that two modules declare or none exports, or an import or
            export of another form than ``import { a } from "./x.js";``, ``export`` in front of a
            declaration, and a last ``export { a };``.
    """
    folder = page_folder() if folder is None else folder
    parts: dict[str, str] = {}
    exported: dict[str, set[str]] = {}
    declared: dict[str, str] = {}
    _add(entry, (), folder, parts, exported, declared)
    return "\n".join(parts.values())


def _add(
    name: str,
    above: tuple[str, ...],
    folder: Traversable,
    parts: dict[str, str],
    exported: dict[str, set[str]],
    declared: dict[str, str],
) -> None:
    """Adds a module behind those that it imports."""
    if name in parts:
        return
    if name in above:
        raise BundleError(f"page: {' imports '.join((*above, name))}; modules cannot be in a ring.")
    try:
        source = (folder / name).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise BundleError(f"page: {above[-1] if above else 'bundle'} needs {name}: none.") from None
    imports = [(_names(names), module) for names, module in IMPORT.findall(source)]
    for wanted, module in imports:
        _add(module, (*above, name), folder, parts, exported, declared)
        if missing := wanted - exported[module]:
            raise BundleError(
                f"page: {name} imports {sorted(missing)}; {module} exports none such."
            )
    body = EXPORT_LIST.sub("", EXPORTED.sub("", IMPORT.sub("", source)))
    _refuse(name, body)
    own = set(_declared(body))
    for found in own:
        if found in declared:
            raise BundleError(f"page: {declared[found]} and {name} both declare {found}; rename.")
        declared[found] = name
    exported[name] = _exported(name, source, own)
    parts[name] = body.strip() + "\n"


def _names(text: str) -> set[str]:
    return {part.strip() for part in text.split(",") if part.strip()}


def _refuse(name: str, body: str) -> None:
    if found := REFUSED.search(body):
        raise BundleError(f"page: {name}: {found[0].strip()!r} is in no form that can be joined.")
    if found := MARKUP.search(body):
        raise BundleError(f"page: {name} has {found[0]!r}, which an inline script cannot hold.")


def _declared(body: str) -> list[str]:
    """The names that are declared at the start of a line; of a pattern all of its names."""
    found = []
    for name in DECLARED.findall(body):
        if name[0] in "{[":
            parts = re.sub(r"[\w$]+\s*:", "", name)
            found += re.findall(r"[\w$]+", re.sub(r"=[^,}\]]*", "", parts))
        else:
            found.append(name)
    return found


def _exported(name: str, source: str, own: set[str]) -> set[str]:
    exported = set()
    for found in EXPORTED.finditer(source):
        declaration = DECLARED.match(source[found.end() :])
        if declaration is None:
            raise BundleError(f"page: {name}: an export without a name that can be read.")
        exported.add(declaration[1])
    for names in EXPORT_LIST.findall(source):
        exported |= _names(names)
    if unknown := exported - own:
        raise BundleError(f"page: {name} exports {sorted(unknown)} but does not declare them.")
    return exported
