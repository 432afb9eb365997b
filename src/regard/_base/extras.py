"""The extras of regard, the error where one is missing, and what a build may lack."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

EXTRA_OF = {
    "tokenizers": "lm",
    "rich": "cli",
    "typer": "cli",
    "starlette": "viewer",
    "uvicorn": "viewer",
    "torch": "torch",
    "matplotlib": "plot",
    "anywidget": "jupyter",
    "transformers": "hf",
    "pyarrow": "survey",
    "threadpoolctl": "survey",
    "fsspec": "remote",
    "aiohttp": "remote",
}

# Why the compiled module lacks an instruction set: it does not know which of the two it was.
NOT_BUILT = (
    "this build was made without it: its compiler could not make it, or REGARD_TARGETS named others"
)


class MissingPackageError(ModuleNotFoundError):
    """A package of one of the extras is not installed; the text says which extra brings it."""


@contextlib.contextmanager
def needed_by(what: str) -> Iterator[None]:
    """Imports in this block are of packages that an extra installs.

    Raises:
        MissingPackageError: one of them is missing.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRA_OF:
            raise
        raise MissingPackageError(
            f'{what} needs {package}. Install it with pip install "regard[{EXTRA_OF[package]}]".',
            name=package,
        ) from error
