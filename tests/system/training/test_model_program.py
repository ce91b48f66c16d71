"""A scenario's own program makes its model: once for a seed and its files, within bounds, or with a reason."""

from pathlib import Path

import pytest

from harness.errors import ModelError
from harness.suite.run.model_program import make_model

_PROGRAM = """
import pathlib, sys, time

out, seed = pathlib.Path(sys.argv[1]), sys.argv[3]
(out / "config.json").write_text("{}")
(out / "tokenizer.json").write_text(pathlib.Path("words.txt").read_text())
(out / "model.safetensors").write_text(f"{seed} {time.time_ns()}")
"""


def _program(folder: Path, content: str = _PROGRAM) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "words.txt").write_text("one two")
    program = folder / "make.py"
    program.write_text(content)
    return program


def _weights(model: Path) -> str:
    return (model / "model.safetensors").read_text()


async def test_it_is_made_once_for_a_seed_and_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The same seed and files give the folder that is there; another seed, and a file changed at any depth, another."""
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "cache"))
    program = _program(tmp_path / "game")
    first = await make_model(program, 1)
    assert _weights(await make_model(program, 1)) == _weights(first)
    assert _weights(await make_model(program, 2)).startswith("2 ")
    (program.parent / "words.txt").write_text("three")
    changed = await make_model(program, 1)
    assert (changed / "tokenizer.json").read_text() == "three"
    assert (first / "tokenizer.json").read_text() == "one two"

    inside = program.parent / "data" / "words"
    inside.mkdir(parents=True)
    (inside / "more.txt").write_text("four")
    deeper = await make_model(program, 1)
    assert deeper != changed
    (inside / "more.txt").write_text("five")
    assert await make_model(program, 1) != deeper
    (inside / "more.txt").write_text("four")
    for name in ("__pycache__", ".git", "runs/one"):
        (inside / name).mkdir(parents=True)
        (inside / name / "run.db").write_bytes(b"nothing that the program reads")
    assert await make_model(program, 1) == deeper


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("import sys; print('no words'); sys.exit(3)", "exit code 3: no words"),
        ("import time; time.sleep(60)", "made no model within 0.5 s"),
        ("pass", "is not a HuggingFace model folder"),
    ],
)
async def test_a_program_that_makes_none_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str, reason: str
):
    """It fails, it is late, it leaves something else: in each case nothing is in the cache."""
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "cache"))
    deadline_s = 0.5 if "sleep" in content else 60.0
    with pytest.raises(ModelError, match=reason):
        await make_model(_program(tmp_path / "game", content), 1, deadline_s=deadline_s)
    assert not [each for each in (tmp_path / "cache" / "made").iterdir() if each.is_dir()]
