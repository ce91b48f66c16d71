"""A checkpoint that would end the server is refused before the server sees it."""

import json
from pathlib import Path

import pytest

from harness.engines.remote.weight_change import require_fitting
from harness.errors import EngineRejected

SHAPES = {"embed": [4, 2], "lm_head.weight": [4, 2], "norm": [2]}


def write(folder: Path, shapes: dict[str, list[int]], content: bytes = b"") -> Path:
    """A checkpoint with tensors of these shapes and no values."""
    header = {name: {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]} for name, shape in shapes.items()}
    encoded = content or json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(len(encoded).to_bytes(8, "little") + encoded)
    return folder


@pytest.mark.parametrize("shapes", [SHAPES, {"embed": [4, 2], "norm": [2]}], ids=["same", "tied head"])
def test_equal_shapes_fit(tmp_path: Path, shapes: dict[str, list[int]]):
    """A head that is tied to the embedding need not be written down."""
    require_fitting(write(tmp_path / "a", SHAPES), write(tmp_path / "b", shapes))


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({**SHAPES, "norm": [3]}, r"norm has shape \(3,\), expected \(2,\) \(1 of 3 tensors\)"),
        ({"embed": [4, 2]}, "norm has shape None"),
        ({**SHAPES, "layer": [1]}, r"layer has shape \(1,\), expected None"),
        ({}, "embed has shape None"),
    ],
    ids=["shape", "missing", "unknown", "empty"],
)
def test_other_tensors_do_not_fit(tmp_path: Path, shapes: dict[str, list[int]], message: str):
    with pytest.raises(EngineRejected, match=message):
        require_fitting(write(tmp_path / "a", SHAPES), write(tmp_path / "b", shapes))


def test_a_broken_file_does_not_fit(tmp_path: Path):
    with pytest.raises(EngineRejected, match=r"model\.safetensors is not a safetensors file"):
        require_fitting(write(tmp_path / "a", SHAPES), write(tmp_path / "b", {}, content=b"\xff" * 20))


def test_a_folder_that_is_not_there_does_not_fit(tmp_path: Path):
    """When the current weights are here, the new ones should be too."""
    with pytest.raises(EngineRejected, match="there is none at"):
        require_fitting(write(tmp_path / "a", SHAPES), tmp_path / "b")


def test_weights_on_another_machine_are_the_server_s_business(tmp_path: Path):
    require_fitting(Path("/weights/on/the/server"), tmp_path / "b")
