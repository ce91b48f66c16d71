"""Every action on real runs: what it does to the sessions, what their agents are told, and that nothing is lost."""

from pathlib import Path
from typing import Any

import pytest

from harness.samples.codec import sample_from_json
from harness.suite.faults.firing import Firing
from harness.suite.record.config import Overrides
from harness.suite.record.rollout_table import RolloutRecord
from harness.suite.run.interrupts import Interrupts
from harness.suite.run.open_run import begin_run, resume_run
from harness.suite.run.report import RunReport, RunStatus, ScenarioReport
from harness.suite.run.runner import SuiteRun
from tests.checkout import ROOT
from tests.harness_command import write_scenario
from tests.played_suites import Silence, incomplete_inside, play
from tests.session_servers.store_file import read_file

SHIPPED = ROOT / "scenarios" / "abort_end_of_rollout"
PROGRAM = (SHIPPED / "agent.py").read_text()
CHECK = (SHIPPED / "check.py").read_text()
SLOW = {"steps": [{"text": "An answer that takes its time.", "token_delay_s": 0.005}]}


async def play_any_faults(tmp_path: Path, *faults: dict[str, Any], **keys: Any) -> RunReport:
    """A scenario of two sessions with three calls each, in which `faults` come; nothing invalid comes out of it."""
    scenario = {
        "samples_per_prompt": 2,
        "prompts": [{"metadata": {"calls": 3, "tool_s": 0.05}}],
        "faults": list(faults),
        "checks": {"min_reward_mean": 1.0, "expect_dropped_trailing_turns": False},
        **keys,
    }
    directory = write_scenario(tmp_path / "s", program=PROGRAM, check=CHECK, script=SLOW, **scenario)
    report = await play(directory, tmp_path / "run")
    assert report.ledger.difference == 0
    samples = [sample_from_json(sample) for record in report.scenarios[0].records for sample in record.samples]
    assert incomplete_inside(tmp_path / "run" / "run.db", samples) == []
    return report


async def play_faults(tmp_path: Path, *faults: dict[str, Any], **keys: Any) -> ScenarioReport:
    """The same, which passes."""
    report = await play_any_faults(tmp_path, *faults, **keys)
    assert report.status is RunStatus.PASSED, report.scenarios[0].verdicts
    return report.scenarios[0]


def only(scenario: ScenarioReport) -> Firing:
    """The one time that the one fault came."""
    ((firing,),) = [fault.firings for fault in scenario.faults]
    return firing


def outcomes(scenario: ScenarioReport) -> list[str]:
    """How the sessions ended, in their order."""
    return [record.outcome.value for record in sorted(scenario.records, key=lambda record: record.number)]


async def test_a_drain_ends_the_sessions_that_are_open(tmp_path: Path):
    """All of them, whoever triggered it; agents are told 404."""
    fault = {"action": "drain", "at_turn": 2, "sessions": [0]}
    scenario = await play_faults(tmp_path, fault, prompts=[{"metadata": {"calls": 30}}])

    assert outcomes(scenario) == ["drained", "drained"]
    assert [set(bystander.told) for bystander in only(scenario).sessions] == [{"404 session_closed"}] * 2


async def test_an_unasked_abort_is_continued(tmp_path: Path):
    """In the middle of a turn, and of one that the engine has not begun yet."""
    middle = {"action": "abort_engine", "at_turn": 1, "at_token": 3, "sessions": [0]}
    beginning = {"action": "abort_engine", "at_turn": 2, "sessions": [1]}
    scenario = await play_faults(tmp_path, middle, beginning)

    assert outcomes(scenario) == ["finished", "finished"]
    turns = [turn for session in read_file(tmp_path / "run" / "run.db").values() for turn in session.turns.values()]
    assert sorted(len(turn.segments) for turn in turns) == [1, 1, 1, 1, 2, 2]


async def test_a_stopped_agent_goes_on_while_the_server_is_gone(tmp_path: Path):
    """The SIGCONT goes to who was stopped: that nobody can be asked who is there changes nothing."""
    stop = {"action": "stop_agent", "at_turn": 2, "sessions": [0], "seconds": 0.3}
    kill = {"action": "kill_server", "at_turn": 2, "sessions": [0], "seconds": 1.0}
    scenario = await play_faults(tmp_path, stop, kill, agent={"profile": "agent.py", "deadline_s": 20.0})

    assert outcomes(scenario) == ["finished", "finished"]


@pytest.mark.parametrize(
    ("faults", "problem"),
    [
        (
            [
                {"action": "stop_agent", "at_turn": 2, "sessions": [0], "seconds": 60.0},
                {"action": "kill_agent", "at_turn": 2, "sessions": [0]},
            ],
            "stop_agent: 1 agent stopped, 1 of them ended before the SIGCONT",
        ),
        (
            [{"action": "kill_server", "at_second": 0.5, "seconds": 0.5}] * 2,
            "kill_server: the server was already killed, and not back yet",
        ),
        (
            [{"action": "kill_engine", "at_second": 0.5, "seconds": 0.5}] * 2,
            "kill_engine: the engine was already killed, and not back yet",
        ),
    ],
)
async def test_a_fault_that_reaches_nobody_is_a_problem(tmp_path: Path, faults: list[dict[str, Any]], problem: str):
    """An undoing whose agent is gone, a blow on what is gone already: the run says so, and fails."""
    prompts = [{"metadata": {"calls": 10, "tool_s": 0.1}}]
    directory = write_scenario(
        tmp_path / "s", program=PROGRAM, check=CHECK, script=SLOW, faults=faults, prompts=prompts
    )
    report = await play(directory, tmp_path / "run")

    assert [each.seen for each in report.scenarios[0].verdicts if not each.holds] == [problem]
    assert report.status is RunStatus.CHECKS_FAILED


async def test_an_agent_that_stays_stopped_is_ended_at_its_deadline(tmp_path: Path):
    fault = {"action": "stop_agent", "at_turn": 2, "sessions": [0]}
    for deadline_s in (6.0, 60.0):  # on a busy machine agents come to their turns later
        agent = {"profile": "agent.py", "deadline_s": deadline_s}
        report = await play_any_faults(tmp_path / f"{deadline_s:g}", fault, agent=agent)
        if report.status is RunStatus.PASSED:
            break

    assert report.status is RunStatus.PASSED, report.scenarios[0].verdicts
    assert outcomes(report.scenarios[0]) == ["timed_out", "finished"]


async def test_a_dead_engine_fails_the_sessions(tmp_path: Path):
    """Agents are told 5xx; the runs are final all the same, because the scenario wanted to see this."""
    prompts = [{"metadata": {"calls": 3, "attempts": 2}}]
    scenario = await play_faults(tmp_path, {"action": "kill_engine", "at_turn": 2}, prompts=prompts)

    assert not set(outcomes(scenario)) & {"drained", "harness_failed"}
    told = {words for bystander in only(scenario).sessions for words in bystander.told}
    assert "503 engine_unavailable" in told


async def test_a_malformed_reply_costs_one_request(tmp_path: Path):
    """The agent asks for the turn again, and the session comes to its end."""
    scenario = await play_faults(tmp_path, {"action": "malformed_reply", "at_turn": 2, "sessions": [0]})

    assert outcomes(scenario) == ["finished", "finished"]
    assert {words for bystander in only(scenario).sessions for words in bystander.told} == {"502 engine_reply_invalid"}


@pytest.mark.parametrize("action", ["cut_connection", "engine_500", "engine_hang", "kill_engine"])
async def test_tokens_that_came_before_a_fault_are_part_of_their_turn(tmp_path: Path, action: str):
    """It continues behind them; unknown is only what the engine may have sampled after them."""
    lasts = {} if action in ("cut_connection", "engine_500") else {"seconds": 0.3}
    fault = {"action": action, "at_turn": 2, "at_token": 4, "sessions": [0], **lasts}
    await play_faults(tmp_path, fault, samples_per_prompt=1)

    [session] = read_file(tmp_path / "run" / "run.db").values()
    [cut] = [turn for turn in session.turns.values() if turn.unknown]
    [lost], [before, after] = cut.unknown, cut.segments
    assert (before["start"], before["end"], after["start"]) == (0, 4, 4)
    assert lost["request_id"] == before["request_id"]


async def test_a_killed_server_comes_back_with_its_sessions(tmp_path: Path):
    """Agents that ask again continue where they were."""
    fault = {"action": "kill_server", "at_turn": 2, "at_token": 4, "sessions": [0], "seconds": 0.3}
    scenario = await play_faults(tmp_path, fault)

    assert outcomes(scenario) == ["finished", "finished"]
    assert only(scenario).did.startswith("the server was killed with ")
    assert [record.session.turns for record in scenario.records] == [3, 3]


async def test_a_request_that_arrives_twice_is_one_turn(tmp_path: Path):
    """The second one continues with what the first one has come to."""
    scenario = await play_faults(tmp_path, {"action": "duplicate_request", "at_turn": 2, "at_token": 4})

    assert outcomes(scenario) == ["finished", "finished"]
    assert [record.session.turns for record in scenario.records] == [3, 3]
    assert not any(record.ledger.dropped for record in scenario.records)
    assert [len(fault.firings) for fault in scenario.faults] == [2]


async def test_the_clock_befalls_whoever_is_there(tmp_path: Path):
    """A fault on one session comes to each that is open, a fault of the network to its next request."""
    kill = {"action": "kill_agent", "at_second": 2.0, "sessions": [1]}
    cut = {"action": "cut_connection", "at_second": 0.1}
    prompts = [{"metadata": {"calls": 20, "tool_s": 0.1}}]
    scenario = await play_faults(tmp_path, cut, kill, prompts=prompts)

    assert outcomes(scenario) == ["finished", "crashed"]


async def test_a_fault_that_never_comes_fails_the_run(tmp_path: Path):
    never = {"action": "drain", "at_turn": 9}
    directory = write_scenario(tmp_path / "s", program=PROGRAM, check=CHECK, faults=[never])
    report = await play(directory, tmp_path / "run")

    (verdict,) = [each for each in report.scenarios[0].verdicts if not each.holds]
    assert (verdict.check, verdict.seen) == ("expect_faults_fired", "never: drain at turn 9")
    assert report.scenarios[0].to_json()["faults"][0]["fired"] == 0

    directory = write_scenario(
        tmp_path / "t", program=PROGRAM, check=CHECK, faults=[never], checks={"expect_faults_fired": False}
    )
    assert (await play(directory, tmp_path / "other")).status is RunStatus.PASSED


class StopAfterFirst(Silence):
    """Asks a run to stop as soon as one rollout has ended."""

    def __init__(self, interrupts: Interrupts) -> None:
        self._interrupts = interrupts

    def end_rollout(self, record: RolloutRecord) -> None:
        """Ask."""
        self._interrupts.request()


async def test_a_resumed_run_begins_its_timeline_anew_for_what_is_left(tmp_path: Path):
    """What came before counts; what is run again meets its faults again, and what a fault ended is not."""
    fault = {"action": "kill_agent", "at_turn": 2, "at_token": 3}
    directory = write_scenario(
        tmp_path / "s", program=PROGRAM, check=CHECK, script=SLOW, concurrency=1, faults=[fault],
        prompts=[{"metadata": {"calls": 3}}], samples_per_prompt=3,
    )  # fmt: skip
    opened = begin_run(str(directory), Overrides(), tmp_path / "run")
    interrupts = Interrupts()
    broken_off = await SuiteRun(opened.selection, opened.directory, StopAfterFirst(interrupts), interrupts).execute()
    assert (broken_off.status, outcomes(broken_off.scenarios[0])) == (RunStatus.INTERRUPTED, ["crashed"])

    opened = resume_run(str(tmp_path / "run"), Overrides(), None)
    report = await SuiteRun(opened.selection, opened.directory, Silence(), Interrupts()).execute()

    (faults,) = report.scenarios[0].faults
    assert outcomes(report.scenarios[0]) == ["crashed"] * 3
    assert [firing.session for firing in faults.firings] == [0, 1, 2]
    assert (report.status, report.ledger.difference) == (RunStatus.PASSED, 0)
