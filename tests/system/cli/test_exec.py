"""`harness exec` and `harness env`: a session for a command line of one's own, on a server that runs."""

import asyncio
import json
import sys
from pathlib import Path

import pytest

from harness.rollouts.agents.profile import expand, literal
from tests.harness_command import Ended, harness
from tests.session_servers.served import says, serving

CALL = """
import json, os, pathlib, urllib.request
body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": "Hello."}]}).encode()
headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
print(json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"])
print("given", os.environ["HARNESS_INSTRUCTION"], "${LITERAL}")
"""


async def run(*arguments: object) -> Ended:
    """How the command ended, while the loop of the server goes on."""
    return await asyncio.to_thread(harness, *map(str, arguments), timeout_s=120)


async def test_a_command_line_has_a_session_of_its_own(tmp_path: Path) -> None:
    """Its record and its samples are printed, and the session is gone."""
    async with serving(*says("Good day.")) as client:
        command = ("--", sys.executable, "-c", CALL)
        asked = ("--server", client.url, "--instruction", "Greet.", "--workdir", tmp_path / "work", "--json")
        ended = await run("exec", *asked, *command)
        left = (await client.http.get("/sessions")).json()

    assert ended.code == 0, ended.stderr
    document = json.loads(ended.stdout)
    assert document["outcome"]["kind"] == "finished"
    assert [turn["reply"]["content"] for turn in document["session"]["turns"]] == ["Good day."]
    assert [sample["metadata"]["turns"] for sample in document["samples"]] == [[0]]
    log = (tmp_path / "work" / "agent.log").read_text()
    assert log.splitlines() == ["Good day.", "given Greet. ${LITERAL}"]
    assert document["session_id"] not in json.dumps(left)


@pytest.mark.parametrize(("program", "code", "words"), [("pass", 1, "no_model_call"), (f"{CALL}\n1 / 0", 1, "crashed")])
async def test_a_command_that_fails_is_no_success(tmp_path: Path, program: str, code: int, words: str) -> None:
    """With the place of its log."""
    async with serving() as client:
        asked = ("--server", client.url, "--workdir", tmp_path / "work")
        ended = await run("exec", *asked, "--", sys.executable, "-c", program)

    assert (ended.code, ended.stdout.split(":")[0]) == (code, words)
    assert str(tmp_path / "work" / "agent.log") in ended.stdout


async def test_a_command_without_a_session_is_not_run(tmp_path: Path) -> None:
    """Nobody listens, nothing to run, an agent of no name: one line each."""
    refused = await run("exec", "--server", "http://127.0.0.1:9", "--", "true")
    nothing = await run("exec")
    nobody = await run("exec", "--agent", "codecs", "--", "true")

    assert (refused.code, nothing.code, nobody.code) == (6, 4, 6)
    assert "-- COMMAND" in nothing.stderr
    assert "did you mean 'codex'?" in nobody.stderr
    assert [ended.stderr.count("\n") for ended in (refused, nothing, nobody)] == [1, 1, 1]


async def test_the_variables_of_a_session_are_printed() -> None:
    """Those of every dialect, for `eval`; the session is open until somebody ends it."""
    async with serving(*says("Hi.")) as client:
        printed = await run("env", "--server", client.url)
        document = json.loads((await run("env", "--server", client.url, "--json")).stdout)
        variables = document["variables"]
        answer = await client.http.post(
            f"{variables['OPENAI_BASE_URL']}/chat/completions",
            json={"model": "m", "messages": [{"role": "user", "content": "Hello."}]},
            headers={"authorization": f"Bearer {variables['OPENAI_API_KEY']}"},
        )

    names = [line.removeprefix("export ").partition("=")[0] for line in printed.stdout.splitlines()]
    assert {"OPENAI_BASE_URL", "OPENAI_API_KEY", "ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY"} <= {*names}
    assert variables["ANTHROPIC_BASE_URL"] + "/v1" == variables["OPENAI_BASE_URL"]
    assert variables["HARNESS_SESSION_ID"] == document["session_id"]
    assert answer.status_code == 200


async def test_an_agent_that_is_configured_by_files_needs_a_home(tmp_path: Path) -> None:
    """It is made, and the files in it know the session."""
    async with serving() as client:
        asked = ("env", "--agent", "codex", "--server", client.url)
        refused = await run(*asked)
        document = json.loads((await run(*asked, "--home", tmp_path / "home", "--json")).stdout)

    assert (refused.code, "--home DIR" in refused.stderr) == (4, True)
    assert document["variables"]["HOME"] == str(tmp_path / "home")
    assert document["variables"]["OPENAI_BASE_URL"] in (tmp_path / "home/.codex/config.toml").read_text()


@pytest.mark.parametrize("text", ["plain", "${A}", "$${A}", "$$${A} $A ${", "a${A}b${B}"])
def test_a_command_line_of_ones_own_is_taken_as_it_is(text: str) -> None:
    """Whatever in it looks like a variable of a profile."""
    assert expand(literal(text), {}) == text
