"""The page of all errors and exit codes, from the classes."""

import inspect
from collections.abc import Iterator
from itertools import pairwise

from harness import errors
from harness.errors import HarnessError, SessionServerError
from harness.suite.exits import ExitCode, exit_code_of

INTRODUCTION = """# Errors

Every error that the harness raises on purpose, from `harness/errors.py`. `make reference` writes this page.
[HTTP answers](http-api.md#errors) have code and status. For first errors and the way out see
[troubleshooting](troubleshooting.md).

Each line has class, code, status, and where to look first: at the `agent` (its request), a `limit` or decision of the
owner, the `engine`, the `scenario` (a setting), or the `harness` (a bug or the machine). *Retry*: the same request may
succeed later. *Exit*: code of a command that ends with the error, if not 3.

"""

EXITS = """
## Exit codes

"""


def errors_page() -> str:
    """The whole page: the tree in its order, then the exit codes with what the enumeration says of each."""
    return INTRODUCTION + "\n".join(map(_row, _tree(HarnessError))) + "\n" + EXITS + "\n".join(_exits()) + "\n"


def _tree(error: type[HarnessError]) -> Iterator[type[HarnessError]]:
    for below in error.__subclasses__():
        if below.__module__ == errors.__name__:
            yield below
            yield from _tree(below)


def _row(error: type[HarnessError]) -> str:
    status = "the answer's status" if error is SessionServerError else error.status
    code = exit_code_of(error.__new__(error))
    exits = "" if code is ExitCode.INTERNAL else code.value
    says = (inspect.getdoc(error) or "").partition("\n\n")[0].replace("\n", " ")
    look = ", ".join([str(error.cause), *(["retry"] if error.retryable else []), *([f"exit {exits}"] if exits else [])])
    return f"- `{error.__name__}` `{error.code}`, {status}, {look}: {says}"


def _exits() -> Iterator[str]:
    """Yield a row per code; a docstring below a member is not kept at run time, so it is read from the source."""
    lines = [line.strip() for line in inspect.getsource(ExitCode).splitlines()]
    for line, following in pairwise(lines):
        name, is_member, value = line.partition(" = ")
        if is_member:
            says = following.strip('"') if following.startswith('"') else ""
            yield f"- {value}, {name.lower().replace('_', ' ')}" + (f": {says}" if says else "")
