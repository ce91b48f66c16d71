"""`[services]`: engine servers and router of a scenario begin with its run and end with it, whatever happens."""

import json
import os
import signal
from pathlib import Path

import psutil
import pytest

from harness.engines.remote.sglang import SGLangTokenProvider
from harness.errors import ScenarioError
from harness.gateway.router.gateway_program import GatewayProgram
from harness.lab.lanes import LaneEngine, LaneSpec, open_lane
from harness.suite.record.config import Overrides
from harness.suite.record.rollout_table import read_rollouts
from harness.suite.run.open_run import begin_run
from tests.harness_command import harness, make_quick, start_harness, wait, wait_for, write_scenario
from tests.played_suites import play
from tests.session_servers.store_file import read_file
from tests.toy_model import write_toy_weights

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

    What a lane sampled is cut by a limit, and continues: the merge rule has what to drop. The connections that break
    are those between the router and its workers.
    """
    del smg  # installed before anything is timed
    model = write_toy_weights(tmp_path / "tiny-random", seed=0)
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
    make_quick(scenario, run)
    ended = harness("run", run, "--resume", "--json", timeout_s=START_S)

    assert alive == []
    assert sum("harness.engines.sglang_server" in program for program in programs) == 2, programs
    assert any("gateways/smg" in program for program in programs), programs
    assert ended.code == 0, ended.stderr
    [report] = ended.document["scenarios"]
    assert ended.document["ledger"]["difference"] == 0
    heard = ended.document["witness"]
    assert heard["agrees"] is True
    assert [each["tokens"] for each in heard["not_comparable"]] == [
        ended.document["ledger"]["generated"] - heard["ledger"]
    ]
    assert report["dropped_trailing_turns"] > 0
    assert [fault["fired"] > 0 for fault in report["faults"]] == [True, True]
    assert sorted(read_rollouts(run / "run.db")) == [0, 1, 2, 3]
    [identity] = json.loads((run / "lock.json").read_text())["digests"].values()
    assert identity["engine"] == "router=local,local"


async def test_workers_that_run_stay_when_their_run_has_ended(tmp_path: Path, smg: GatewayProgram):
    """Behind a router of the run they say the words of its script, its faults reach them, and they live on.

    The connection of one session breaks; with no engine of the run to be killed, `kill_engine` cuts the way to all.
    Weights that would have another version than the scenario says do not change.
    """
    del smg  # installed before anything is timed
    model = write_toy_weights(tmp_path / "tiny-random", seed=0)
    scenario = write_scenario(
        tmp_path / "s",
        engine={"model": str(model), "script": "script.toml", "force_script": True},
        script={"steps": [{"text": "One. " * 12}] * 3},
        services={"lanes": [{"engine": "sglang"}], "router": True},
        prompts=[{"metadata": {"turns": 3}}] * 2,
        faults=[
            {"action": "cut_connection", "at_turn": 2, "at_token": 4, "sessions": [0]},
            {"action": "kill_engine", "at_turn": 3, "seconds": 0.2},
        ],
        checks={"min_finished": 4, "min_turns": 3, "expect_dropped_trailing_turns": False},
    )
    async with open_lane(LaneSpec(LaneEngine.LOCAL, model)) as worker:
        report = await play(scenario, tmp_path / "run", Overrides(workers=[f"sglang={worker.url}"]))
        async with SGLangTokenProvider(worker.url, vocab_size=259) as engine:
            health = await engine.health()
            await engine.update_weights(model, "3")
        weights = {"updates": [{"when": "in_turn"}]}
        changing = write_scenario(tmp_path / "w", engine={"model": str(model)}, weights=weights)
        with pytest.raises(ScenarioError, match=r"expected engines at version 0.* serve version 3"):
            await play(changing, tmp_path / "changed", Overrides(workers=[f"sglang={worker.url}"]))
    sessions = read_file(tmp_path / "run" / "run.db").values()

    assert report.exit_code == 0, [verdict for each in report.scenarios for verdict in each.verdicts]
    assert (health.ready, health.running, health.waiting) == (True, 0, 0)
    assert {turn.reply["content"] for session in sessions for turn in session.turns.values()} == {"One. " * 12}


def test_another_engine_takes_the_place_of_services(tmp_path: Path):
    """`--engine` runs the scenario where its lanes cannot be had."""
    scenario = write_scenario(tmp_path / "s", engine={"model": str(tmp_path / "toy")}, services=SERVICES)
    selection = begin_run(str(scenario), Overrides(engine="scripted"), tmp_path / "run").selection

    assert selection.folders[0].scenario.services is None
    assert selection.folders[0].scenario.engine.name == "scripted"
