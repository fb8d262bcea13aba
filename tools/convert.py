"""`megarl convert`, for those who have the repository and not the command: see there."""

from __future__ import annotations

import sys

from megarl.cli.main import main as megarl


def main(argv: list[str] | None = None) -> int:
    """Exit code 2 and one line for what cannot be converted."""
    return megarl(["convert", *(sys.argv[1:] if argv is None else argv)])


if __name__ == "__main__":
    sys.exit(main())
