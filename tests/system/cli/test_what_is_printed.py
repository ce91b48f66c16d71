"""What a user reads at the end of a run, and what a wrong command line says."""

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from harness.server.settings import ServerSettings
from harness.sessions.ledger import Ledger, Unknown
from harness.viewer.terminal import ledger_words
from tests.checkout import ROOT
from tests.harness_command import harness, write_scenario
from tests.logged import capture_logs
from tests.session_servers.served import serving
from tests.trained_scenario import write_trained_scenario

pytestmark = pytest.mark.agent

CRASH = """
# /// script
# requires-python = ">=3.11"
# ///
import json, os, sys
metadata = json.loads(os.environ["HARNESS_METADATA"])
if os.path.exists(metadata["mended"]):
    sys.exit()
print("no eggs left" if metadata["turns"] == 2 else "no milk left")
sys.exit(3)
"""


def test_a_flag_beats_a_variable_of_the_other_group(tmp_path: Path):
    """`export HARNESS_SERVER=...` is for other commands; two flags, and two variables, still contradict each other."""
    scenario = write_scenario(tmp_path / "s")
    server, engine = {"HARNESS_SERVER": "http://127.0.0.1:9"}, {"HARNESS_ENGINE": "scripted"}
    otlp = {"HARNESS_OTLP_ENDPOINT": "http://127.0.0.1:9"}
    runs = ("run", scenario, "--out")

    assert harness(*runs, tmp_path / "1", "--engine", "scripted", env=server | otlp).code == 0
    for number, env in enumerate((engine, engine | otlp, {"HARNESS_MODEL": "m", "HARNESS_TEMPLATE": "t"}), 2):
        at_server = harness(*runs, tmp_path / str(number), "--server", "http://127.0.0.1:9", env=env)
        assert "got both" not in at_server.stderr
        assert "127.0.0.1:9" in at_server.stderr.splitlines()[-1]
    for arguments, env in ((("--server", "http://127.0.0.1:9", "--engine", "scripted"), {}), ((), server | engine)):
        refused = harness(*runs, tmp_path / "x", *arguments, env=env)
        assert (refused.code, "got both" in refused.stderr) == (4, True)


def test_no_authentication_beats_a_token_of_the_environment(tmp_path: Path):
    """And both as flags are refused."""
    serve = ("serve", "--engine", "scripted", "--tokenizer", tmp_path / "none", "--no-auth")
    for arguments, words in (((), "tokenizer.json"), (("--admin-token", "x"), "got both")):
        assert words in harness(*serve, *arguments, env={"HARNESS_ADMIN_TOKEN": "t"}).stderr


def test_agents_that_crash_in_one_way_are_one_line_with_reason_and_log(tmp_path: Path):
    """And attempts that were played again are named, and are no rows."""
    mended, run = tmp_path / "mended", tmp_path / "run"
    prompts = [{"metadata": {"turns": turns, "mended": str(mended)}} for turns in (2, 3)]
    scenario = write_scenario(tmp_path / "s", program=CRASH, prompts=prompts, check=None)
    printed = " ".join(harness("run", scenario, "--out", run).stdout.split())
    mended.touch()
    again = harness("run", run, "--resume", "--only", "failed")
    shown = harness("show", run).stdout
    differs = harness("diff", run, run, "--json").document

    assert f"2 x no eggs left: sessions 0-1, log {run / 'sessions' / '0' / 'agent.log'}" in printed
    assert f"2 x no milk left: sessions 2-3, log {run / 'sessions' / '2' / 'agent.log'}" in printed
    assert printed.endswith(f"next: harness show {run} 0")
    assert "playing rollouts again that failed: 4;" in again.stderr
    assert "failed rollouts that were rerun: 4" in again.stdout
    assert "no outcome" not in shown
    assert "superseded: 4 sessions of attempts that were rerun: " in shown
    assert "crashed" not in shown
    assert [*differs["outcomes"]] == ["no_model_call"]


def test_one_error_of_a_check_is_one_problem(tmp_path: Path):
    """With the sessions that it cost."""
    check = "def score(session, result, metadata):\n    return {'rewards': 1}[str(metadata['turns'] // 4)]"
    prompts = [{"metadata": {"turns": turns}} for turns in (1, 2, 4)]
    ended = harness("run", write_scenario(tmp_path / "s", check=check, prompts=prompts), "--out", tmp_path / "run")
    printed = " ".join(ended.stdout.split())

    assert "4 x no score, check.py: KeyError: '0' (line 2): sessions 0-3, log" in printed
    assert "sessions 0-3: check.py: KeyError: '0'" in printed
    assert "sessions 4-5: check.py: KeyError: '1'" in printed


@pytest.mark.parametrize("model", [(), ("--model", "toy")])
def test_weights_of_a_model_that_has_none_are_refused_at_once(tmp_path: Path, model: tuple[str, ...]):
    """Before there is a directory."""
    write_scenario(tmp_path / "s")
    arguments = ("run", "weight_updates", "--engine", "scripted", *model, "--out", tmp_path / "run")
    refused = harness(*arguments, cwd=tmp_path)

    assert refused.code == 4
    assert "expected a model with weights, got" in refused.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("arguments", [("serve",), ("--help",)])
def test_an_interruption_during_the_imports_is_quiet(tmp_path: Path, arguments: tuple[str, ...]):
    """Ctrl+C in the first moment, here from a module that is imported first."""
    (tmp_path / "typer.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    ended = harness(*arguments, env={"PYTHONPATH": str(tmp_path)})

    assert (ended.code, ended.stdout, ended.stderr) == (2, "", "harness: interrupted\n")


async def test_the_example_of_the_readme_says_why_it_came_to_nothing(tmp_path: Path):
    """Its rollout is data, whatever happened: the reason is printed beside the outcome."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    [example] = [each for each in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "SESSION_SERVER" in each]
    async with serving(settings=ServerSettings(admin_token="right")) as client:
        env = {**os.environ, "SESSION_SERVER": client.url, "HARNESS_ADMIN_TOKEN": "wrong"}
        command = (sys.executable, "-c", example)
        said = await asyncio.to_thread(
            subprocess.run, command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True
        )

    assert said.stdout.startswith("not_started no session: POST /sessions: 401 expected the admin token")


async def test_a_look_at_the_status_of_a_server_raises_no_alarm():
    """A plain server is asked whether it is a router."""
    with capture_logs() as logs:
        async with serving() as client:
            ended = await asyncio.to_thread(harness, "ctl", "status", "--server", client.url)

    assert ended.code == 0, ended.stderr
    assert [line for line in logs if line["event"] == "route_not_found"] == []


def test_training_says_in_a_pipe_what_it_does(tmp_path: Path):
    """Each step when it begins."""
    ended = harness("train", write_trained_scenario(tmp_path / "s"), "--steps", "2", "--out", tmp_path / "run")

    assert ended.code == 0, ended.stderr
    assert [line for line in ended.stderr.splitlines() if line.startswith("collecting")] == [
        "collecting and training step 1 of 2",
        "collecting and training step 2 of 2",
    ]


def test_a_budget_that_was_never_set_bounds_nothing():
    """Requests of no budget may have come to the model's context: their number says more."""
    assert "unknown: 9 requests" in (words := ledger_words(Ledger(900, 900, unknown=Unknown(9, 9_434_117))))
    assert "9,434,117" not in words
    assert "unknown: 2 requests, at most 60 tokens" in ledger_words(Ledger(900, 900, unknown=Unknown(2, 60)))
