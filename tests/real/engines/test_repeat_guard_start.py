"""A real SGLang or vLLM that is told to guard and cannot does not start; whatever else attaches the guard, works.

Processes of the engines' environments, without a model: what they do before they would load one.
"""

import asyncio
import os
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

import server_patch.repeat_terminate
from harness.lab.lanes import INSTALLED, LaneEngine, LaneSpec
from harness.lab.lanes.commands import server_command, write_overlay
from harness.lab.lanes.environment import Requirements, provide_python
from server_patch.repeat_terminate.config import CONFIG_JSON
from tests.looping_prompt import SERVED_CONFIG
from tests.real_engines import in_environment_of

ON_PATH = Path(server_patch.repeat_terminate.__path__[0]) / "on_path"
EXCLUDED = {"SGLANG_PLUGINS": "another"}
PORT = 1  # nothing gets as far as listening

IS_GUARDED = (
    "from sglang.srt.plugins import load_plugins; load_plugins(); import sglang.srt.managers.scheduler as m;"
    " print(hasattr(m.Req.update_finish_state, '_harness_repeat_terminate'))"
)

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(name="engine", params=[pytest.param(each, marks=in_environment_of(each)) for each in INSTALLED])
def _engine(request: pytest.FixtureRequest) -> LaneEngine:
    return request.param


@pytest.fixture(name="run")
def _run(engine: LaneEngine, model_dir: Path, tmp_path: Path) -> Run:
    """Runs Python code, or the server itself, in the engine's environment."""
    python = asyncio.run(provide_python(Requirements.of(engine), lambda text: None))
    path = write_overlay(engine, tmp_path / "overlay")

    def run(
        code: str | None, more: Mapping[str, str], *, first: tuple[Path, ...] = ()
    ) -> "subprocess.CompletedProcess[str]":
        spec = LaneSpec(engine, model_dir, env={**SERVED_CONFIG.to_environ(), **more})
        command = server_command(spec, PORT, python, [*first, *path], os.environ)
        arguments = command.arguments if code is None else [str(python), "-c", code]
        return subprocess.run(
            arguments, env=command.environment, capture_output=True, text=True, timeout=300, check=False
        )

    return run


def test_a_server_with_a_wrong_configuration_does_not_start(run: Run) -> None:
    """The last thing it says is the key that is wrong, and how to do without."""
    done = run(None, {CONFIG_JSON: '{"ngram_sise": 8}'})

    assert done.returncode == 1
    assert "ngram_sise: no such key" in done.stderr.splitlines()[-1]
    assert "HARNESS_REPEAT_TERMINATE_ENABLE=0" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("engine", [pytest.param(LaneEngine.SGLANG, marks=in_environment_of(LaneEngine.SGLANG))])
def test_a_folder_on_the_path_is_enough(engine: LaneEngine, run: Run) -> None:
    """The scheduler of vLLM is found in the same way; `tests/unit/repeat_guard/test_attach.py` has a stand-in of it."""
    done = run(IS_GUARDED, EXCLUDED, first=(ON_PATH,))

    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "True"), done.stderr
    assert "repeat guard: attached" in done.stderr
