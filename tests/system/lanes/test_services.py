"""`[services]`: engine servers and router of a scenario begin with its run and end with it, whatever happens."""

import json
import os
import signal
from pathlib import Path

import psutil
import pytest

from harness.router.gateway_program import GatewayProgram
from harness.suite.record.config import Overrides
from harness.suite.record.rollout_table import read_rollouts
from harness.suite.run.open_run import begin_run
from tests.harness_command import harness, start_harness, wait, wait_for, write_scenario
from tests.system.lanes.test_local_lane import write_weights

pytestmark = [pytest.mark.agent, pytest.mark.timeout(600)]

START_S = 240
SERVICES = {"lanes": [{"engine": "local", "count": 2}], "router": True}
FAULTS = [
    {"action": "cut_connection", "at_turn": 2, "sessions": [0]},
    {"action": "abort_engine", "at_turn": 3, "sessions": [1]},
]
QUICK_THEN_SLOW = [{"metadata": {"turns": 6}}, {"metadata": {"turns": 4000, "pause_s": 0.1}}]


def command_of(process: psutil.Process) -> str:
    """Its command line; empty when it has ended meanwhile, as agents with a result do."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # a zombie too
        return ""


def test_a_run_has_its_lanes_and_router_and_leaves_none_of_them(tmp_path: Path, smg: GatewayProgram):
    """Two lanes and a gateway; `kill -9` of the run ends them all, and its resume starts its own.

    What a lane sampled is cut by a limit, and goes on: the merge rule has something to drop. The connections that break
    are those between the router and its workers.
    """
    del smg  # installed before anything is timed
    model = write_weights(tmp_path / "tiny-random", seed=0)
    scenario = write_scenario(
        tmp_path / "s",
        engine={"model": str(model)},
        services=SERVICES,
        faults=FAULTS,
        prompts=QUICK_THEN_SLOW,
        limits={"tokens_per_turn": 6},
        after_incomplete="serve",
        checks={"min_turns": 3, "expect_dropped_trailing_turns": True},
    )
    run = tmp_path / "run"
    process = start_harness("run", scenario, "--out", run, "-n", "4", log=tmp_path / "log")
    try:
        for number in (2, 3):
            wait_for(run / "sessions" / str(number) / "agent.log", "assistant>", timeout_s=START_S)
        for number in (0, 1):
            wait_for(run / "sessions" / str(number) / "result.json", timeout_s=START_S)
        started = psutil.Process(process.pid).children(recursive=True)
        programs = [each for each in map(command_of, started) if each]
    finally:
        os.kill(process.pid, signal.SIGKILL)
        wait(process)
    _, alive = psutil.wait_procs(started, timeout=60)
    for path in (scenario / "scenario.toml", run / "config.toml"):
        path.write_text(path.read_text().replace("turns = 4000", "turns = 3"))
    ended = harness("run", run, "--resume", "--json", timeout_s=START_S)

    assert alive == []
    assert sum("harness.engines.sglang_server" in program for program in programs) == 2, programs
    assert any("gateways/smg" in program for program in programs), programs
    assert ended.code == 0, ended.stderr
    [report] = ended.document["scenarios"]
    assert ended.document["ledger"]["difference"] == 0
    assert report["dropped_trailing_turns"] > 0
    assert [fault["fired"] > 0 for fault in report["faults"]] == [True, True]
    assert sorted(read_rollouts(run / "run.db")) == [0, 1, 2, 3]
    [identity] = json.loads((run / "lock.json").read_text())["digests"].values()
    assert identity["engine"] == "router=local,local"


def test_another_engine_takes_the_place_of_services(tmp_path: Path):
    """`--engine` runs the scenario where its lanes cannot be had."""
    scenario = write_scenario(tmp_path / "s", engine={"model": str(tmp_path / "toy")}, services=SERVICES)
    selection = begin_run(str(scenario), Overrides(engine="scripted"), tmp_path / "run").selection

    assert selection.folders[0].scenario.services is None
    assert selection.folders[0].scenario.engine.name == "scripted"
