"""From what follows `--model` to a folder."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.errors import ModelError
from harness.lab.models import resolve_model
from harness.machine.cache import cache_directory


def test_a_local_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "model-00001-of-00001.safetensors"):
        (tmp_path / name).touch()

    assert resolve_model(str(tmp_path)) == tmp_path.resolve()


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()

    with pytest.raises(ModelError, match=r"tokenizer\.json, \*\.safetensors missing"):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize("model", ["no-such-model", "/no/such/folder", "./nothing"])
def test_what_is_neither_is_refused(model: str) -> None:
    with pytest.raises(ModelError, match="smollm2-135m-instruct"):
        resolve_model(model)


def test_a_hub_that_does_not_answer_is_a_model_error() -> None:
    """With the name of the model. In a process of its own: the address of the hub is read once per process."""
    program = "from harness.lab.models import resolve_model; resolve_model('nobody/nothing')"
    environment = os.environ | {"HF_ENDPOINT": "http://127.0.0.1:9"}
    finished = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False
    )

    assert "ModelError: the hub does not give nobody/nothing" in finished.stderr


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"HARNESS_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, Path("/a")),
        ({"XDG_CACHE_HOME": "/b"}, Path("/b/session-harness")),
        ({"HOME": "/c"}, Path("/c/.cache/session-harness")),
    ],
)
def test_where_models_are_kept(environment: dict[str, str], expected: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HARNESS_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    assert cache_directory() == expected
