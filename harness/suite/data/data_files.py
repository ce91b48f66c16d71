"""Files of a data set: one, or those of a folder as `save_to_disk` or the Hugging Face hub make it."""

import json
import re
from collections import defaultdict
from pathlib import Path

from harness.errors import ScenarioError

DATA_SUFFIXES = (".parquet", ".csv", ".arrow", ".jsonl", ".ndjson")

_STATE = "state.json"
"""List of the data files beside it, in order."""
_SHARD = re.compile(r"[-_./]?\d+(-of-\d+)?(-[0-9a-f]{16})?$")


def find_data_files(path: Path, split: str | None) -> list[Path]:
    """Return the data files of `path`, in order. Raises `ScenarioError` unless one split is meant."""
    if not path.is_dir():
        if split is not None:
            raise ScenarioError(f"{path}: expected a folder beside data.split = {split!r}, got a file")
        return [path]
    splits = _saved_splits(path) or _hub_splits(path)
    if not splits:
        raise ScenarioError(f"{path}: expected files of a data set ({', '.join(DATA_SUFFIXES)}), got a folder of none")
    fitting = [name for name in splits if split is None or name == split or name.endswith(f"/{split}")]
    if len(fitting) != 1:
        got = "none" if split is None else repr(split)
        raise ScenarioError(f"{path}: data.split: expected one of {', '.join(splits)}, got {got}")
    return splits[fitting[0]]


def _saved_splits(path: Path) -> dict[str, list[Path]]:
    splits = {}
    for state in sorted(path.rglob(_STATE)):
        try:
            names = [str(each["filename"]) for each in json.loads(state.read_bytes())["_data_files"]]
        except (ValueError, TypeError, KeyError, OSError) as error:
            raise ScenarioError(f"{state}: expected the file of a saved data set, got another: {error!r}") from None
        if outside := [name for name in names if Path(name).name != name]:
            raise ScenarioError(f"{state}: expected files of its folder, got {outside[0]!r}")
        splits[state.parent.relative_to(path).as_posix()] = [state.parent / name for name in names]
    return splits


def _hub_splits(path: Path) -> dict[str, list[Path]]:
    """Group files by name without the shard: `data/train-00000-of-00002.parquet` is of `data/train`."""
    splits = defaultdict(list)
    for file in sorted(each for each in path.rglob("*") if each.suffix in DATA_SUFFIXES):
        splits[_SHARD.sub("", file.relative_to(path).with_suffix("").as_posix())].append(file)
    return dict(splits)
