"""The model of the tests: the first layers of SmolLM2-135M-Instruct, real weights with the real tokenizer.

What an engine promises does not depend on how deep its model is, and its cost does: on a CPU each token reads all
weights, of which eight layers and the output matrix are four tenths. Whole models are sampled from by what users run:
the quickstart, `chain_sglang`, the games. Folders are made once and kept in pytest's cache.
"""

import fcntl
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.lab.models import resolve_model

NAME = "smollm2-135m-instruct"
LAYERS = 8
"""Of 30; with fewer, no prompt was found that loops as `looping_prompt` needs it."""

_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def made_once(pytestconfig: pytest.Config, kind: str, write: Callable[[Path], None]) -> Path:
    """The folder that `write` fills, under the name of the model: by the first worker that wants it."""
    folder = Path(pytestconfig.cache.mkdir(f"{kind}-{LAYERS}")) / NAME
    with (folder.parent / "lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            scratch = folder.with_name("scratch")
            shutil.rmtree(scratch, ignore_errors=True)
            write(scratch)
            scratch.rename(folder)
    return folder


@pytest.fixture(scope="session", name="whole_model_dir")
def _whole_model_dir() -> Path:
    """The folder of the real model; fetching it is part of what is tested, so a failure is a failure."""
    return resolve_model(NAME)


@pytest.fixture(scope="session", name="model_dir")
def _model_dir(whole_model_dir: Path, pytestconfig: pytest.Config) -> Path:
    """The folder of the model of the tests."""
    return made_once(pytestconfig, "shallow", lambda folder: _write_shallow(whole_model_dir, folder))


def _write_shallow(source: Path, target: Path) -> None:
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"num_hidden_layers": LAYERS}))
    kept = {
        name: tensor
        for name, tensor in load_file(source / "model.safetensors").items()
        if not (layer := _LAYER.match(name)) or int(layer[1]) < LAYERS
    }
    save_file(kept, target / "model.safetensors", metadata={"format": "pt"})
