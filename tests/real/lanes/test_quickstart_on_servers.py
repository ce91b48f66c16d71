"""The quickstart passes on real SGLang and on real vLLM, as it does on the local engine.

One of its groups, cut to three guesses: the others ask nothing else of an engine, and they take minutes here.
"""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from harness import read_samples
from harness.lab.lanes import INSTALLED, LaneEngine, find_lanes
from harness.samples.delivery import turn_spans
from tests.checkout import ROOT
from tests.real_engines import on_real

pytestmark = [pytest.mark.model, pytest.mark.agent]

_RUN_S = 1000  # its agents have deadlines; this is for a server that has to be installed first


def run_suite(suite: Path, engine: str | None, model: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """A run on `engine`, or on what `suite` asks for, that passed every check; its engines counted the same tokens."""
    what = (str(suite), "--model", model, "--out", str(directory), "--json")
    other = () if engine is None else ("--engine", engine)
    command = [sys.executable, "-m", "harness", "run", *what, *other]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=_RUN_S)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    heard = result["witness"]
    assert (heard["engines"], heard["difference"], heard["not_comparable"]) == (result["ledger"]["generated"], 0, [])
    return done


@pytest.fixture(name="short_quickstart")
def _short_quickstart(tmp_path: Path) -> Path:
    """The quickstart cut to one group of two sessions that guess up to three times."""
    folder = shutil.copytree(ROOT / "scenarios" / "quickstart", tmp_path / "short_quickstart")
    file = folder / "scenario.toml"
    text = file.read_text().replace('name = "quickstart"', 'name = "short_quickstart"')
    text = text.replace("answers = 8", "answers = 3")
    until_second, *_ = text.partition("[[prompts]]\nmetadata.game = { secret = 4")
    file.write_text(f"{until_second}[checks]\nmin_finished = 2\n")
    return folder


def engine_of(directory: Path) -> str:
    """What the run was sampled with, as its lock has it."""
    [digests] = json.loads((directory / "lock.json").read_text())["digests"].values()
    return str(digests["engine"])


def programs_of(directory: Path) -> list[str]:
    """The engine servers that sampled, with their versions."""
    [programs] = json.loads((directory / "lock.json").read_text())["engines"].values()
    return list(programs)


@pytest.mark.parametrize("engine", [pytest.param(each, marks=on_real(each)) for each in INSTALLED])
def test_on_a_running_server(
    engine: LaneEngine, request: pytest.FixtureRequest, short_quickstart: Path, model_dir: Path, tmp_path: Path
) -> None:
    """With `--engine sglang=URL`, or that of a vLLM; the next test starts one."""
    url = request.getfixturevalue(f"{engine}_url")
    run_suite(short_quickstart, f"{engine}={url}", str(model_dir), tmp_path / "run")

    assert engine_of(tmp_path / "run") == engine


@pytest.mark.parametrize("lane", [pytest.param(LaneEngine.SGLANG, marks=on_real(LaneEngine.SGLANG))])
def test_the_chain_scenario_passes_with_an_engine_of_its_own(lane: LaneEngine, tmp_path: Path) -> None:
    """What ships: router, engine, sampled words, an abort in the middle, new weights; samples of several turns.

    The progress lines say what is started, and where its log is; it is gone afterwards.
    """
    name = "smollm2-135m-instruct"
    said = run_suite(ROOT / "scenarios" / f"chain_{lane}", None, name, tmp_path / "run").stderr

    started = dict(re.findall(rf"starting (\w+) with {name} at (\S+) \(log: ", said))
    assert started.keys() == {lane}
    assert engine_of(tmp_path / "run") == f"router={lane}"
    [program] = programs_of(tmp_path / "run")
    assert re.fullmatch(rf"{lane} \d+\.\d+\S*", program)
    assert not {*started.values()} & {each.url for each in find_lanes()}
    samples = read_samples(tmp_path / "run" / "samples.jsonl")
    turns = [len(list(turn_spans(sample))) for sample in samples if sample.loss_mask.any()]
    assert len(turns) > 4  # one that is aborted in its first turn may have none
    assert max(turns) > 1
    assert {str(sample.status) for sample in samples} >= {"aborted", "completed"}
    assert {int(each) for sample in samples for each in sample.behavior_versions} >= {0, 1}
