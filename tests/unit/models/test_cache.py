"""The manifest of a cached model tells whether it still is what was written."""

from collections.abc import Callable
from pathlib import Path

import pytest

from harness.errors import ModelError
from harness.machine.cache import MANIFEST, is_intact, require_space, silent, write_manifest

RECIPE = {"format": 1}


@pytest.fixture(name="folder")
def _folder(tmp_path: Path) -> Path:
    """A model as it was written."""
    (tmp_path / "weights").write_bytes(b"0123456789")
    (tmp_path / "tokenizer").write_bytes(b"abc")
    write_manifest(tmp_path, RECIPE)
    return tmp_path


def test_what_was_written_is_intact(folder: Path) -> None:
    assert is_intact(folder, RECIPE, silent)


def test_a_model_made_by_another_recipe_is_not(folder: Path) -> None:
    assert not is_intact(folder, {"format": 2}, silent)


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "weights").write_bytes(b"0123456780"),
        lambda folder: (folder / "weights").write_bytes(b"012345678"),
        lambda folder: (folder / "tokenizer").unlink(),
        lambda folder: (folder / MANIFEST).unlink(),
        lambda folder: (folder / MANIFEST).write_text("{"),
        lambda folder: (folder / MANIFEST).write_text("[]"),
    ],
    ids=["flipped", "truncated", "missing", "no manifest", "half a manifest", "another manifest"],
)
def test_any_damage_is_seen(folder: Path, damage: Callable[[Path], object]) -> None:
    damage(folder)

    assert not is_intact(folder, RECIPE, silent)


def test_a_folder_that_does_not_exist_is_not_intact(tmp_path: Path) -> None:
    assert not is_intact(tmp_path / "missing", RECIPE, silent)


def test_too_little_space_is_said_before_anything_is_fetched(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"MiB left.*HARNESS_CACHE"):
        require_space(tmp_path, 1 << 60)
