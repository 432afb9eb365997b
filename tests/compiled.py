"""What tests compile, kept in pytest's cache until a source, the compiler or an option changes."""

import contextlib
import functools
import hashlib
import os
import shutil
import subprocess
import time
from pathlib import Path

WEEK = 7 * 24 * 3600


@functools.cache
def version(compiler):
    return subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout


def read_by(path):
    """A file, and where it is a source the headers beside it and those of the kernels."""
    if path.is_dir():
        return sorted(path.glob("*.h"))
    if path.suffix != ".cpp":
        return [path]
    kernels = path.parents[1] / ("" if path.parent.name == "target" else "kernels")
    return [path, *sorted(path.parent.glob("*.h")), *sorted(kernels.glob("*.h"))]


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
        digest = hashlib.sha256(version(words[0]) + source.encode())
        for word in words:
            if word == product:
                continue
            read = read_by(Path(word)) if Path(word).exists() else []
            for part in [path.read_bytes() for path in read] or [word.encode()]:
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
