"""The harness as a user has it: what the wheel carries, run outside of the checkout."""

import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.checkout import ROOT
from tests.harness_command import Ended, harness

_RUN_S = 1800.0  # a model on a busy CPU

RunShipped = Callable[..., Ended]
"""`harness run NAME --out DIRECTORY --json` with further options, to its end."""


@pytest.fixture(scope="session", name="wheel")
def _wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from this checkout."""
    directory = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(directory)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = directory.glob("*.whl")
    return wheel


@pytest.fixture(scope="session", name="installed_wheel")
def _installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for `PYTHONPATH` with everything that the wheel installs."""
    site = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    return site


@pytest.fixture(scope="session", name="run_shipped")
def _run_shipped(installed_wheel: Path) -> RunShipped:
    """Runs a scenario that comes along, with nothing but its name: on the model and the engine that it says itself."""

    def run(name: str, out: Path, *options: str | Path) -> Ended:
        env = {**os.environ, "PYTHONPATH": str(installed_wheel)}
        return harness("run", name, "--out", out, "--json", *options, env=env, cwd=installed_wheel, timeout_s=_RUN_S)

    return run
