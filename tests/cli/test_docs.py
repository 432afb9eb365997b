"""docs/cli.md shows what the commands print.

``python tests/cli/test_docs.py`` writes the outputs anew.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "cli.md"
BLOCK = re.compile(r"```console\n\$ (.+)\n((?:.*\n)*?)```")
NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e-\d+)?")


def printed(command):
    """What a command prints, in the folder of the project."""
    as_module = command.replace("regard ", f"{sys.executable} -m regard ", 1)
    if "|" in command:
        as_module = re.sub(
            r"\bregard (?=show|heads|generate)", f"{sys.executable} -m regard ", command
        )
    surroundings = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    run = subprocess.run(
        ["bash", "-c", as_module],
        cwd=ROOT,
        env={**surroundings, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    return (run.stdout + run.stderr).rstrip("\n") + "\n"


@pytest.mark.parametrize(("command", "shown"), BLOCK.findall(PAGE.read_text()))
def test_the_page_shows_what_the_command_prints(command, shown):
    found = printed(command)
    assert NUMBER.sub("#", found).split() == NUMBER.sub("#", shown).split()
    # Another machine may round another way.
    for number, expected in zip(NUMBER.findall(found), NUMBER.findall(shown)):
        assert float(number) == pytest.approx(float(expected), rel=0.01, abs=1)


if __name__ == "__main__":
    text = BLOCK.sub(
        lambda block: f"```console\n$ {block[1]}\n{printed(block[1])}```", PAGE.read_text()
    )
    PAGE.write_text(text)
