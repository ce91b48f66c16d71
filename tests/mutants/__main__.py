"""Takes one guard after the other out of a copy of the checkout, and expects the test that stands for it to fail.

    python -m tests.mutants

Without any mutant all of those tests must pass. A test that cannot be collected, or a run that is killed, is no
failure. Ends with 1 when a mutant survives, or its code has changed.
"""

import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.mutants.copied import copy_checkout, replaced, run_tests
from tests.mutants.table import MUTANTS, Mutant


def main() -> int:
    """Run the table; the exit status."""
    began, survivors = time.monotonic(), 0
    with TemporaryDirectory(prefix="mutants-") as directory:
        copy = Path(directory).resolve()
        copy_checkout(copy)
        if wrong := find_broken(copy):
            print(f"without any mutant:\n{wrong}")
            return 1
        for mutant in MUTANTS:
            started = time.monotonic()
            why_alive = try_mutant(copy, mutant)
            survivors += bool(why_alive)
            verdict = "ALIVE" if why_alive else "red"
            print(f"{time.monotonic() - started:6.1f} s  {verdict:5}  {mutant.file}: {mutant.why}", flush=True)
            if why_alive:
                print(f"{mutant.test}: {why_alive}")
    print(f"{len(MUTANTS) - survivors} of {len(MUTANTS)} mutants are red, in {time.monotonic() - began:.0f} s")
    return 1 if survivors else 0


def find_broken(copy: Path) -> str:
    """A line for each test that does not pass without a mutant."""
    tests = list(dict.fromkeys(mutant.test for mutant in MUTANTS))
    verdicts = run_tests(copy, tests)
    told = {test: ", ".join(sorted(verdicts.of(test))) or "did not run" for test in tests}
    return verdicts.problem or "\n".join(f"{test}: {verdict}" for test, verdict in told.items() if verdict != "passed")


def try_mutant(copy: Path, mutant: Mutant) -> str:
    """Why `mutant` counts as alive; empty when its test has failed."""
    file = copy / mutant.file
    found = file.read_text(encoding="utf-8").count(mutant.old)
    if found != 1:
        return f"its code is there {found} times, expected once; rewrite the row"
    with replaced(file, mutant.old, mutant.new):
        verdicts = run_tests(copy, [mutant.test])
    told = verdicts.of(mutant.test)
    if "failure" in told and told <= {"failure", "passed"}:
        return ""
    return verdicts.problem or ", ".join(sorted(told)) or "did not run"


if __name__ == "__main__":
    sys.exit(main())
