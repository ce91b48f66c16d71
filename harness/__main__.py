"""`python -m harness` is the `harness` command: quiet when it is interrupted, while it is imported too."""

import sys


def main() -> None:
    try:
        from harness.cli.main import main as run
    except KeyboardInterrupt:
        sys.stderr.write("harness: interrupted\n")
        sys.exit(2)
    run()


if __name__ == "__main__":
    main()
