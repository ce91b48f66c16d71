"""Build a scenario's own model: `[train] model_program`.

    python PROGRAM OUT --seed SEED

writes a loadable folder (`config.json`, `*.safetensors`, tokenizer, chat template) into the empty folder OUT. The
program runs in the scenario's folder and the harness's environment, and dies with the harness.
"""

import asyncio
import hashlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from harness._version import __version__
from harness.errors import LaneError, ModelError
from harness.lab.models import resolve_model
from harness.machine.cache import building, cache_directory, is_intact, silent, write_manifest
from harness.machine.program import run
from harness.suite.record.rundir import RunDirectory
from harness.suite.scenarios.folder import SCENARIO_FILE

PROGRAM_S = 900.0
_LAST_WORDS = 500  # characters of what a program said that are worth a reader's time


async def make_model(program: Path, seed: int, *, deadline_s: float = PROGRAM_S) -> Path:
    """Return the model's folder, cached by seed and the scenario's files. Raises `ModelError` without a model."""
    recipe = await asyncio.to_thread(_recipe, program, seed)
    target = cache_directory() / "made" / f"{program.parent.name}-{recipe['digest'][:16]}-{seed}"
    async with building(target, lambda _: None, is_there=lambda: is_intact(target, recipe, silent)) as built:
        if built is not None:
            built.mkdir()
            await _run(program, built, seed, deadline_s)
            await asyncio.to_thread(resolve_model, str(built))
            write_manifest(built, recipe)
    return target


def _recipe(program: Path, seed: int) -> dict[str, str]:
    digest, folder = hashlib.sha256(), program.parent
    for path in _files_in(folder):
        name = path.relative_to(folder).as_posix()
        if name != SCENARIO_FILE:
            digest.update(f"{name}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return {"program": program.name, "digest": digest.hexdigest(), "seed": str(seed), "harness": __version__}


def _files_in(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.is_file():
            yield path
        elif not (
            path.is_symlink() or path.name.startswith((".", "__pycache__")) or RunDirectory(path).database.exists()
        ):
            yield from _files_in(path)


async def _run(program: Path, built: Path, seed: int, deadline_s: float) -> None:
    command, env = (str(program), str(built), "--seed", str(seed)), {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        ended = await run(
            sys.executable, *command, deadline_s=deadline_s, env=env, cwd=program.parent, ends_children=True
        )
    except LaneError:
        raise ModelError(f"{program} made no model within {deadline_s:g} s") from None
    if ended.code:
        said = (ended.output + ended.messages).strip()[-_LAST_WORDS:]
        raise ModelError(f"{program} made no model, it ended with exit code {ended.code}: {said}")
