"""A copy of the checkout as it stands, in which files can be changed and tests be run."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree as ET

from tests.checkout import ROOT

_TEST_S = 60
_RUN_S = 600
_ORIGINAL_AT, _MUTATED_AT = 1, 2
_LAST_WORDS = 15


class Verdicts(NamedTuple):
    """What became of tests."""

    by_case: Mapping[str, str]
    """`passed`, `failure`, `error` or `skipped`, by node id."""
    problem: str
    """The last words of a run that came to none: it could not collect them, was killed, or hung; else empty."""

    def of(self, test: str) -> set[str]:
        """Those of all cases of `test`, a node id without parameters."""
        return {verdict for case, verdict in self.by_case.items() if case.partition("[")[0] == test}


def copy_checkout(to: Path) -> None:
    """Copy what git knows, and what it would: new files are part of a working tree too."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    for name in filter(None, os.fsdecode(listed.stdout).split("\0")):
        if (ROOT / name).is_file():  # one that was deleted is listed until that is committed
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name, follow_symlinks=False)


@contextmanager
def replaced(file: Path, old: str, new: str) -> Iterator[None]:
    """`file` with `new` in the place of `old` while the block runs."""
    text = file.read_text(encoding="utf-8")
    _write(file, text.replace(old, new), _MUTATED_AT)
    try:
        yield
    finally:
        _write(file, text, _ORIGINAL_AT)


def _write(file: Path, text: str, at: int) -> None:
    """Write `file` with a time of its own: by that Python knows whether the bytecode beside it is still the file's."""
    file.write_text(text, encoding="utf-8")
    os.utime(file, (at, at))


def run_tests(copy: Path, tests: Sequence[str]) -> Verdicts:
    """Run `tests` on the code of `copy`, in their order, with the interpreter of this process."""
    report = copy / "verdicts.xml"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:randomly", "-p", "no:cacheprovider"]
    try:
        ran = subprocess.run(
            [*command, f"--timeout={_TEST_S}", f"--junitxml={report}", *tests],
            cwd=copy,
            env={**os.environ, "PYTHONPATH": str(copy)},  # before the checkout, which is installed as editable
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_RUN_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Verdicts({}, f"the tests took longer than {_RUN_S} s")
    if ran.returncode not in (0, 1):
        said = "\n".join(ran.stdout.splitlines()[-_LAST_WORDS:])
        return Verdicts({}, f"pytest ended with {ran.returncode}:\n{said}")
    cases = ET.parse(report).iter("testcase")
    return Verdicts({_node_id(case): _verdict(case) for case in cases}, "")


def _node_id(case: ET.Element) -> str:
    return f"{case.attrib['classname'].replace('.', '/')}.py::{case.attrib['name']}"


def _verdict(case: ET.Element) -> str:
    """The worst that is said of it."""
    return next((kind for kind in ("error", "failure", "skipped") if case.find(kind) is not None), "passed")
