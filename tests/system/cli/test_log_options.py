"""What stands on standard error when somebody asks for more or less; standard output is that of the result."""

import json
import signal
from pathlib import Path

import pytest

from tests.harness_command import announced, harness, start_harness, wait, write_scenario
from tests.toy_model import write_toy_model


def test_a_log_beside_a_document(tmp_path: Path):
    """`-vv --json`: lines of the log, and one document."""
    scenario = write_scenario(tmp_path / "small", samples_per_prompt=1, prompts=[{"metadata": {"turns": 2}}])
    ended = harness("run", scenario, "--out", tmp_path / "out", "-vv", "--json")

    events = [json.loads(line)["event"] for line in ended.stderr.splitlines() if line.startswith("{")]
    assert (ended.code, ended.document["status"]) == (0, "passed"), ended.stderr
    assert events.count("turn_ended") == 2


@pytest.mark.parametrize(
    ("arguments", "env", "is_told"), [((), {}, True), (("-q",), {}, False), ((), {"HARNESS_LOG_LEVEL": "error"}, False)]
)
def test_a_server_says_as_much_as_it_is_asked_to(
    arguments: tuple[str, ...], env: dict[str, str], is_told: bool, tmp_path: Path
):
    """That it is open, and how it stopped; one that is quiet says nothing but its result."""
    command = ("serve", "--engine", "scripted", "--port", "0", "--no-auth", "--json")
    process = start_harness(*command, *arguments, env={"HARNESS_TOKENIZER": str(write_toy_model(tmp_path)), **env})
    announced(process)
    process.send_signal(signal.SIGTERM)
    ended = wait(process)

    assert (ended.code, bool(ended.stderr)) == (0, is_told)
