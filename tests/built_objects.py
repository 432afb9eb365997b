"""What the installed kernels were linked from, where the install keeps it."""

import re
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parent.parent
KERNELS = ROOT / "kernels"
NANOBIND = "libnanobind-static.a"


def installed_objects(*, binding=False):
    """Paths, or None where they are not kept, or a source is newer than what was linked of them.

    Args:
        binding: whether what makes a module for this Python of them is among them.
    """
    newest = max(path.stat().st_mtime for path in KERNELS.rglob("*") if path.is_file())
    module = f"_kernels{sysconfig.get_config_var('EXT_SUFFIX')}"
    for linked in (ROOT / "build").glob(f"cp*/{module if binding else '_kernels*'}"):
        folder = linked.parent
        objects = [*(folder / "CMakeFiles/_kernels.dir/kernels").rglob("*.o")]
        if not objects or linked.stat().st_mtime <= newest:
            continue
        if not binding:
            return [path for path in objects if not path.name.startswith("bind")]
        if (folder / NANOBIND).exists():
            return [*objects, folder / NANOBIND]
    return None


def definitions(built, *, emulates=False):
    """What dispatch.cpp is compiled with where these targets are linked."""
    known = dict.fromkeys(re.findall(r"REGARD_\w+", (KERNELS / "dispatch.cpp").read_text()))
    left_out = ("TARGET", "EMULATES") if emulates else ("TARGET", "EMULATED", "EMULATES")
    known = [name for name in known if not name.endswith(left_out)]
    return ["-DREGARD_EMULATES"] * emulates + [
        f"-D{name}=&{own}_target" if (own := name[7:].lower()) in built else f"-D{name}=nullptr"
        for name in known
    ]
