"""The page of all errors and exit codes, from the classes."""

import inspect
from collections.abc import Iterator
from itertools import pairwise

from harness import errors
from harness.errors import HarnessError, SessionServerError
from harness.suite.exits import ExitCode, exit_code_of

INTRODUCTION = """# Errors

Every error that the harness raises on purpose, from `harness/errors.py`; this page is written by `make reference`. The
codes that a client sees: [HTTP](http-api.md#errors). The first ones that people meet, word for word, and the way out:
[troubleshooting](troubleshooting.md).

*To blame* is where to look first: `agent` the request itself, `limit` a limit or a decision of the owner, `engine`,
`scenario` a setting, `harness` a bug or the machine. *Again* says whether the same request may succeed later. *Exit* is
the code of a command that ends with it, where that is not 3.

| error | code | status | to blame | again | exit | |
| --- | --- | --- | --- | --- | --- | --- |
"""

EXITS = """
## Exit codes

| code | name | |
| --- | --- | --- |
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
    status = "that of the answer" if error is SessionServerError else error.status
    code = exit_code_of(error.__new__(error))
    exits = "" if code is ExitCode.INTERNAL else code.value
    says = (inspect.getdoc(error) or "").partition("\n\n")[0].replace("\n", " ").replace("|", "\\|")
    again = "yes" if error.retryable else "no"
    return f"| `{error.__name__}` | `{error.code}` | {status} | {error.cause} | {again} | {exits} | {says} |"


def _exits() -> Iterator[str]:
    """A docstring below a member is not kept at run time, so it is read from the source."""
    lines = [line.strip() for line in inspect.getsource(ExitCode).splitlines()]
    for line, says in pairwise(lines):
        name, is_member, value = line.partition(" = ")
        if is_member:
            yield f"| {value} | {name.lower()} | {says.strip(chr(34))} |"
