"""What tests compile, kept until what the compiler reads, an option or the compiler changes."""

import contextlib
import functools
import hashlib
import os
import re
import shutil
import subprocess
import time
from itertools import pairwise
from pathlib import Path

WEEK = 7 * 24 * 3600


@functools.cache
def version(compiler):
    return subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout


INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+"(.+)"', re.MULTILINE)


def add_included(text, folders, known):
    """Adds to ``known`` what a source includes from some folders, and what that does, by its path.

    Files that a macro leaves out are among them.
    """
    for name in INCLUDE.findall(text):
        found = (path for folder in folders if (path := (folder / name).resolve()).is_file())
        if (path := next(found, None)) and path not in known:
            known[path] = path.read_bytes()
            add_included(known[path].decode(), [path.parent, *folders[1:]], known)


class Compiler:
    """Runs a command of a compiler, or takes what it gave before from the folder."""

    def __init__(self, folder):
        self.folder = folder

    def __call__(self, *command, source=""):
        """Its product is what follows ``-o``; without one it is that the command succeeds."""
        words = list(map(str, command))
        product = words[words.index("-o") + 1] if "-o" in words else None
        kept = self.folder / self._key(words, product, source)
        if kept.exists():
            os.utime(kept)
            if product:
                shutil.copy(kept, product)
            return
        done = subprocess.run(words, input=source, capture_output=True, text=True, timeout=1200)
        assert done.returncode == 0, done.stderr[-3000:]
        self._keep(product, kept)

    def _key(self, words, product, source):
        folders = [Path(word) for before, word in pairwise(words) if before == "-I"]
        parts, included = [version(words[0]), source.encode()], {}
        add_included(source, [Path(), *folders], included)
        for word in words:
            path = Path(word)
            if word == product or path in folders:
                continue
            parts.append(path.read_bytes() if path.is_file() else word.encode())
            if path.suffix == ".cpp":
                add_included(parts[-1].decode(), [path.parent, *folders], included)
        digest = hashlib.sha256()
        for part in (*parts, *included.values()):
            digest.update(b"%d " % len(part) + part)
        return digest.hexdigest()

    def _keep(self, product, kept):
        """At once or not at all, as another worker may read it; what was long unused goes."""
        written = kept.with_suffix(f".{os.getpid()}")
        shutil.copy(product, written) if product else written.touch()
        written.replace(kept)
        for path in self.folder.iterdir():
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_mtime < time.time() - WEEK:
                    path.unlink()
