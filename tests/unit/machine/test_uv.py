"""uv and pip, whoever has made the environment."""

import subprocess
import sys
from pathlib import Path

import pytest
import uv

import harness
from harness.errors import LaneError
from harness.machine.program import find_uv, pip_command


def test_an_environment_without_pip_has_that_of_uv(tmp_path: Path):
    """Environments of uv have none; `engine up` and the catalogue of models download by pip."""
    python, packages = tmp_path / "bin" / "python", tmp_path / "packages"
    subprocess.run([uv.find_uv_bin(), "venv", "--quiet", "--python", sys.executable, tmp_path], check=True)
    packages.mkdir()
    (tmp_path / "bin" / "uv").symlink_to(uv.find_uv_bin())
    installed = Path(uv.__file__ or "").parent.parent
    for home in (Path(harness.__file__ or "").parent, *installed.iterdir()):
        if not home.name.startswith(("pip", "_")) and not (packages / home.name).exists():
            (packages / home.name).symlink_to(home)
    show = "from harness.machine.program import pip_command; print(*pip_command(), sep='\\n')"
    environment = {"PYTHONPATH": str(packages), "PATH": str(Path(uv.find_uv_bin()).parent)}
    shown = subprocess.run([python, "-c", show], env=environment, capture_output=True, text=True, check=True)

    assert pip_command() == [sys.executable, "-m", "pip"]
    assert shown.stdout.split("\n")[1:3] == ["tool", "run"]
    assert shown.stdout.endswith(f"--python\n{python}\npip\n")


def test_uv_is_that_of_path_without_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The base install has none; without both, the error names the extra."""
    monkeypatch.setitem(sys.modules, "uv", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaneError, match=r"pip install 'session-harness\[run\]'"):
        find_uv()
    (tmp_path / "uv").touch(mode=0o755)
    assert find_uv() == str(tmp_path / "uv")
