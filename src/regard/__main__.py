"""``regard`` and ``python -m regard``: the command line, where its packages are installed."""

from __future__ import annotations

import sys
from typing import NoReturn

from regard._base.extras import MissingPackageError


def main() -> NoReturn:
    """Runs the command line; where it is not installed, says so and exits with 1."""
    try:
        from regard.cli import main as run
    except MissingPackageError as error:
        sys.exit(f"regard: {error}")
    except KeyboardInterrupt:
        sys.exit(130)  # as a shell has it: 128 + SIGINT
    run()


if __name__ == "__main__":
    main()
