"""A server sees `server_patch` and its entry points, from a checkout as from a wheel, and nothing else of ours."""

import json
import os
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from harness.lab.lanes import INSTALLED, LaneEngine
from harness.lab.lanes.commands import write_overlay
from tests.checkout import ROOT

DECLARED = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
OF_LANES = {
    ("sglang.srt.plugins", "harness_cpu"),
    ("sglang.srt.plugins", "harness_force_tokens"),
    ("vllm.general_plugins", "harness_waiting"),
    ("vllm.logits_processors", "harness_force_tokens"),
}

SEEN = """
import json
from importlib.metadata import distribution
points = distribution("session-harness").entry_points
import server_patch.force_tokens.script
print(json.dumps([[point.group, point.name, point.value] for point in points]))
"""


def seen(import_path: list[Path]) -> list[tuple[str, str, str]]:
    """The entry points that a program with this import path finds, which can also import the package."""
    environment = os.environ | {"PYTHONPATH": ":".join(str(path) for path in import_path)}
    python = Path(sys.base_prefix, "bin", f"python{sys.version_info.major}.{sys.version_info.minor}")
    answer = subprocess.run([python, "-c", SEEN], env=environment, capture_output=True, text=True, check=True)
    return [tuple(point) for point in json.loads(answer.stdout)]


@pytest.mark.parametrize("engine", INSTALLED)
def test_a_server_finds_what_is_declared_and_what_is_for_lanes(engine: LaneEngine, tmp_path: Path) -> None:
    """The guard's plugins as the distribution declares them, `ForceTokens` and quiet waiting besides."""
    points = seen(write_overlay(engine, tmp_path / "overlay"))

    declared = {(group, name, value) for group, names in DECLARED.items() for name, value in names.items()}
    assert {point for point in points if point[:2] not in OF_LANES} == declared
    assert {point[:2] for point in points} >= OF_LANES


def test_an_installed_distribution_has_nothing_that_is_for_lanes() -> None:
    """A server that others use must not force tokens, and waits as its makers meant it to."""
    assert not any(name in DECLARED.get(group, {}) for group, name in OF_LANES)


def test_the_stand_ins_are_on_the_path_of_sglang_only(tmp_path: Path) -> None:
    paths = {engine: write_overlay(engine, tmp_path / engine) for engine in INSTALLED}

    assert [path.name for path in paths[LaneEngine.SGLANG]] == ["path", "sglang"]
    assert [path.name for path in paths[LaneEngine.VLLM]] == ["vllm"]


def test_an_installed_wheel_works_as_a_checkout_does(tmp_path: Path, installed_wheel: Path) -> None:
    """There the entry points come from metadata, and all files that a lane needs are in the wheel."""
    program = (
        "import harness; from pathlib import Path; from harness.lab.lanes import LaneEngine\n"
        "from harness.lab.lanes.environment import Requirements; from harness.lab.lanes.commands import write_overlay\n"
        f"paths = write_overlay(LaneEngine.SGLANG, Path({str(tmp_path / 'overlay')!r}))\n"
        "print(harness.__file__, Requirements.of(LaneEngine.VLLM).digest, *paths, sep='\\n')"
    )
    environment = os.environ | {"PYTHONPATH": str(installed_wheel)}
    answer = subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    module, _, *paths = answer.stdout.split("\n")[:-1]

    assert module.startswith(str(installed_wheel))
    assert (Path(paths[0]) / "sgl_kernel" / "__init__.py").is_file()
    declared = {(group, name, value) for group, names in DECLARED.items() for name, value in names.items()}
    assert declared < set(seen([Path(path) for path in paths]))


def test_the_metadata_is_that_of_this_version(tmp_path: Path) -> None:
    """Plugins are listed under the distribution that they come from."""
    [overlay] = write_overlay(LaneEngine.VLLM, tmp_path / "overlay")

    [found] = metadata.distributions(path=[str(overlay)])
    assert (found.name, found.version) == ("session-harness", metadata.version("session-harness"))
