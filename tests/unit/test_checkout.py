"""What lies at the top of the checkout is on a list: a file that a test or a tool left there is none of it."""

import subprocess
import tomllib

from tests.checkout import ROOT

ENTRIES = {
    *(
        ".ci",
        ".github",
        ".gitignore",
        ".pre-commit-config.yaml",
        "AGENTS.md",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "LICENSE",
    ),
    *("Makefile", "README.md", "SECURITY.md", "changelog.d", "constraints.txt"),
    *(
        "agents",
        "bench",
        "deploy",
        "docs",
        "examples",
        "harness",
        "pyproject.toml",
        "scenarios",
        "server_patch",
        "soak",
        "tests",
    ),
}


def test_the_checkout_has_the_entries_of_the_list():
    """A new one is put on the list by whoever wants it."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert {path.partition("/")[0] for path in listed.split("\0") if path} == ENTRIES


def test_every_room_of_tests_is_run():
    """By `make test`, but for the one of `make soak`."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pytest"]["ini_options"]
    rooms = {"/".join(path.relative_to(ROOT).parts[:2]) for path in (ROOT / "tests").rglob("test_*.py")}

    assert rooms == {*settings["testpaths"], "tests/soak"}
