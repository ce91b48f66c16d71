"""Greets."""

import sys

from version import VERSION


def main() -> None:
    if sys.argv[1:] == ["--version"]:
        print(VERSION)
    elif len(sys.argv) == 2:
        print(f"Hello, {sys.argv[1]}!")
    else:
        raise SystemExit(2)
