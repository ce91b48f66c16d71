"""Part of this project that an engine's server sees: `server_patch` and its entry points, nothing else.

A new folder for each lane links to the package and has the distribution metadata by which SGLang and vLLM find plugins.
So environments stay as installed, and a lane runs the code of the harness that started it.
"""

import os
import tomllib
from collections.abc import Mapping
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from harness._version import __version__
from harness.lab.lanes.spec import LaneEngine

DISTRIBUTION = "session-harness"

EntryPoints = Mapping[str, Mapping[str, str]]

# Declared here and not in the distribution: a server that other programs use must not have `force_tokens`, and one with
# a GPU or cores of its own does not want `sglang_cpu` or `vllm_cpu`.
_OF_LANES: EntryPoints = {
    "sglang.srt.plugins": {
        "harness_cpu": "server_patch.sglang_cpu:register",
        "harness_force_tokens": "server_patch.force_tokens.sglang_plugin:register",
    },
    "vllm.general_plugins": {"harness_waiting": "server_patch.vllm_cpu.waiting:register"},
    "vllm.logits_processors": {"harness_force_tokens": "server_patch.force_tokens.vllm_processor:ForceTokens"},
}


def write_overlay(engine: LaneEngine, folder: Path) -> list[Path]:
    """Fill the new folder `folder` and return the import path of a server."""
    folder.mkdir(parents=True)
    (folder / "server_patch").symlink_to(server_patch(), target_is_directory=True)
    distribution = folder / f"{DISTRIBUTION.replace('-', '_')}-{__version__}.dist-info"
    distribution.mkdir()
    (distribution / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {DISTRIBUTION}\nVersion: {__version__}\n")
    declared, sections = _read_entry_points(), []
    for group in sorted({*declared, *_OF_LANES}):
        points = {**declared.get(group, {}), **_OF_LANES.get(group, {})}
        sections.append(f"[{group}]\n" + "".join(f"{name} = {target}\n" for name, target in sorted(points.items())))
    (distribution / "entry_points.txt").write_text("\n".join(sections))
    stand_ins = [server_patch() / "sglang_cpu" / "path"] if engine is LaneEngine.SGLANG else []
    return [*stand_ins, folder]


def own_import_path(parent: Mapping[str, str]) -> list[Path]:
    """Return the import path of the local engine's server."""
    inherited = parent.get("PYTHONPATH", "").split(os.pathsep)
    return [server_patch().parent, *(Path(folder).absolute() for folder in inherited if folder)]


def server_patch() -> Path:
    spec = find_spec("server_patch")
    assert spec is not None, "one distribution ships both packages"
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0])


def _read_entry_points() -> EntryPoints:
    project = server_patch().parent / "pyproject.toml"
    if project.is_file():  # a checkout, whose entry points are newer than an install's
        table = tomllib.loads(project.read_text(encoding="utf-8"))["project"]
        if table["name"] == DISTRIBUTION:
            return dict(table.get("entry-points", {}))
    groups: dict[str, dict[str, str]] = {}
    for point in metadata.distribution(DISTRIBUTION).entry_points:
        groups.setdefault(point.group, {})[point.name] = point.value
    return groups
