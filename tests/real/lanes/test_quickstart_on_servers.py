"""The quickstart suite passes on real SGLang and on real vLLM, as it does on the local engine."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from harness.lanes import INSTALLED, LaneEngine, find_lanes
from tests.real_engines import on_real

pytestmark = [pytest.mark.model, pytest.mark.agent]

_RUN_S = 1000  # its agents have deadlines; this is for a server that has to be installed first


def run_quickstart(engine: str, model_dir: Path, directory: Path) -> subprocess.CompletedProcess[str]:
    """A run that passed every check, the ledger among them.

    Two sessions at a time: with eight, each has an eighth of a busy machine and 120 seconds to finish.
    """
    what = ("quickstart", "-n", "2", "--engine", engine, "--model", str(model_dir), "--out", str(directory), "--json")
    command = [sys.executable, "-m", "harness", "run", *what]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=_RUN_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def engine_of(directory: Path) -> str:
    """What the run was sampled with, as its lock has it."""
    [digests] = json.loads((directory / "lock.json").read_text())["digests"].values()
    return str(digests["engine"])


def test_on_a_running_sglang(sglang_url: str, model_dir: Path, tmp_path: Path) -> None:
    """With `--engine sglang=URL`."""
    run_quickstart(f"sglang={sglang_url}", model_dir, tmp_path / "run")

    assert engine_of(tmp_path / "run") == "sglang"


def test_on_a_running_vllm(vllm_url: str, model_dir: Path, tmp_path: Path) -> None:
    """With `--engine vllm=URL`."""
    run_quickstart(f"vllm={vllm_url}", model_dir, tmp_path / "run")

    assert engine_of(tmp_path / "run") == "vllm"


@pytest.mark.parametrize("engine", [pytest.param(each, marks=on_real(each)) for each in INSTALLED])
def test_a_server_that_is_started_for_the_run_is_gone_afterwards(
    engine: LaneEngine, model_dir: Path, tmp_path: Path
) -> None:
    """With `--engine sglang` or `vllm`; the progress lines say what is started, and where its log is."""
    said = run_quickstart(engine, model_dir, tmp_path / "run").stderr

    [url] = re.findall(rf"starting {engine} with smollm2-135m-instruct at (\S+) \(log: ", said)
    assert engine_of(tmp_path / "run") == engine
    assert url not in {lane.url for lane in find_lanes()}
