"""``regard --version``."""

from __future__ import annotations

import importlib
import platform
from importlib import metadata

from regard._base.extras import NOT_BUILT


def version_text() -> str:
    """Version, CPU, and whether the compiled module is there, with its instruction set."""
    try:
        kernels = importlib.import_module("regard._kernels")
        cpu = str(kernels.cpu_name())
        module = f"present, for {kernels.target()}"
        for name, reason in kernels.obstacles().items():
            module += f"\n  not {name}: {reason}"
        for name in kernels.targets_left_out():
            module += f"\n  not {name}: {NOT_BUILT}"
    except ImportError:
        cpu = platform.processor() or platform.machine()
        module = (
            "missing: no C++ compiler that builds it was found when regard was installed."
            " Everything works in NumPy; install a newer compiler, then regard again, to have it."
        )
    return (
        f"regard {metadata.version('regard')}\nPython {platform.python_version()}\n"
        f"CPU {cpu}\ncompiled module {module}\n"
    )
