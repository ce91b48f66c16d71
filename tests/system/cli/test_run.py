"""`harness run` as a process, on a scripted engine and a real agent program."""

import json
from pathlib import Path

import pytest

from tests.harness_command import harness, write_scenario

pytestmark = pytest.mark.agent


def test_json_is_the_result_file_and_samples_are_what_a_trainer_needs(tmp_path: Path):
    """One document on standard output; reward, index and group of each sample; every trained token in the ledger."""
    options = ("--shuffle", "2", "--out", tmp_path / "run", "--json")
    ended = harness("run", write_scenario(tmp_path / "s"), *options)
    result = json.loads((tmp_path / "run" / "result.json").read_text())

    assert (ended.document | {"problems": [], "next": ended.document["next"]}) == ended.document
    assert {name: each for name, each in ended.document.items() if name not in ("problems", "next")} == result
    assert "assistant> One." in (tmp_path / "run" / "sessions" / "0" / "agent.log").read_text()
    scenario, generated = result["scenarios"][0], result["ledger"]["generated"]
    assert [result["witness"][name] for name in ("engines", "ledger", "difference", "agrees")] == [
        generated, generated, 0, True
    ]  # fmt: skip
    assert (result["status"], result["exit_code"], result["ledger"]["difference"]) == ("passed", 0, 0)
    assert (scenario["sessions"], scenario["turns"], scenario["outcomes"]) == (4, 10, {"finished": 4})
    assert [rollout["score"]["told"] for rollout in scenario["rollouts"]] == [3, 3, 2, 2]
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    places = [(sample["index"], sample["group_index"], sample["reward"]) for sample in samples]
    assert places == [(0, 0, 0.3), (1, 0, 0.3), (2, 1, 0.2), (3, 1, 0.2)]
    assert sum(sum(sample["loss_mask"]) for sample in samples) == result["ledger"]["trained"] == generated


CHECKS = {
    "min_reward_mean": (0.9, "at least 0.9", "0.250"),
    "min_finished": (5, "at least 5", "4"),
    "min_turns": (3, "at least 3", "2"),
    "min_tool_calls": (1, "at least 1", "0"),
    "min_truncated_turns": (1, "at least 1", "0"),
    "expect_dropped_trailing_turns": (True, "some", "0"),
}
"""What none of them holds for: the figure that is asked for, and the words of what was expected and seen."""


def test_a_suite_with_a_check_that_does_not_hold_fails(tmp_path: Path):
    """Exit code 1; each scenario is complete and says what was expected and what came."""
    for name, (figure, _, _) in CHECKS.items():
        write_scenario(tmp_path / "suite" / name, checks={name: figure})
    ended = harness("run", tmp_path / "suite", "--out", tmp_path / "run", "--json")
    scenarios = ended.document["scenarios"]

    assert ended.code == 1
    assert {each["name"]: [check for check in each["checks"] if not check["holds"]] for each in scenarios} == {
        name: [{"check": name, "expected": expected, "seen": seen, "holds": False}]
        for name, (_, expected, seen) in CHECKS.items()
    }


def test_an_engine_that_is_not_there_is_infrastructure(tmp_path: Path):
    """Exit code 6, one line, and how to continue."""
    names = ("--engine", "sglang=http://127.0.0.1:9", "--model", "tiny-random-qwen3")
    ended = harness("run", write_scenario(tmp_path / "s"), *names, "--out", tmp_path / "run")

    assert ended.code == 6
    assert f"resume with: harness run {tmp_path / 'run'} --resume" in ended.stderr
    assert ended.stderr.splitlines()[-1].startswith("harness: ")


def test_an_engine_that_fails_later_leaves_a_run_to_resume(tmp_path: Path):
    """Rollouts that it failed say nothing about the model: exit code 6, no result file.

    It fails for longer than the server and the agent's client library repeat a request.
    """
    script = {"steps": [{"text": "One."}, *[{"fault": "unavailable"}] * 20]}
    ended = harness("run", write_scenario(tmp_path / "s", script=script), "--out", tmp_path / "run")

    assert ended.code == 6, ended.stderr
    assert "engine_failed" in ended.stdout
    assert "difference 0" in ended.stdout
    assert "interrupted" in ended.stdout
    assert not (tmp_path / "run" / "result.json").exists()
