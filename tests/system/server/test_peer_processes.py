"""The record says which process made a call, where the server can see that."""

import asyncio
import json
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from harness.engines.scripted import ScriptStep
from harness.machine.peer_process import Ends, find_processes
from harness.machine.peer_processes import PeerProcesses
from harness.types import Json
from tests.checkout import ROOT
from tests.session_servers.served import Client, RawClient, Served, says, serving, session_on, url_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="there is no /proc")

PROGRAMS = ROOT / "tests" / "processes"
AGENT = str(PROGRAMS / "calling_agent.py")
PYTHON = f"{Path(sys.executable).resolve()}"
CURL = (
    'curl --silent "$OPENAI_BASE_URL/chat/completions" -H "authorization: Bearer $OPENAI_API_KEY"'
    """ -d '{"messages": [{"role": "user", "content": "hi"}]}'"""
)
MADE = {
    "a script of the same Python": (f"'{sys.executable}' made_program.py", f"{PYTHON} {PROGRAMS}/made_program.py"),
    "Node": ("node made_program.mjs", f"{Path(shutil.which('node') or '').resolve()} {PROGRAMS}/made_program.mjs"),
    "curl": (CURL, str(Path(shutil.which("curl") or "").resolve())),
}


@pytest.fixture(autouse=True, name="lookups")
def _lookups() -> None:
    """Each server has a program of its own, as servers have that no test starts."""


def call(command: str) -> str:
    """What the model says to have a command run."""
    arguments = {"name": "run_shell", "arguments": {"command": command}}
    return f"<tool_call>\n{json.dumps(arguments)}\n</tool_call>"


async def play(client: Client[Any], session: Served, *words: str) -> int:
    """Run the agent to its end; its process id."""
    env = {**os.environ, "OPENAI_BASE_URL": f"{session.base_url}/v1", "OPENAI_API_KEY": session.api_key}
    agent = await asyncio.create_subprocess_exec(
        *(sys.executable, "-X", "utf8", AGENT, *words), env=env, cwd=PROGRAMS, start_new_session=True
    )
    assert await agent.wait() == 0
    return agent.pid


async def processes(client: Client[Any], session: Served) -> list[Json]:
    """Those of its turns."""
    return [turn["notes"]["client"].get("process") for turn in (await client.record(session))["turns"]]


async def processes_of(*steps: ScriptStep, words: Sequence[str] = ()) -> tuple[list[Json], Json]:
    """Those of the turns of an agent that is told `steps`, and the record."""
    async with session_on(*steps) as (client, session):
        pid = await play(client, session, *words)
        found, record = await processes(client, session), await client.record(session)
    assert found[0]["id"].startswith(f"{pid}.")
    return found, record


@pytest.mark.parametrize(("command", "program"), MADE.values(), ids=MADE)
async def test_a_program_of_the_model_is_another_one_below_the_agent(command: str, program: str):
    """Whatever it says of itself: it runs another file or script, stands below the agent, and began after its call."""
    (agent, made, again), record = await processes_of(*says(call(command), "of the program", "done"))

    assert agent["program"] == f"{PYTHON} {AGENT}"
    assert again == agent
    assert made["program"] == program
    assert agent["id"] in made["ancestors"]
    assert agent["began_at"] < record["turns"][0]["created_at"] < made["began_at"] < record["turns"][1]["created_at"]
    assert str(psutil.Process().pid) in [each.partition(".")[0] for each in agent["ancestors"]]


@pytest.mark.parametrize(("by", "is_below"), [("nohup", True), ("setsid", False)])
async def test_a_program_in_the_background_is_below_the_agent_as_long_as_it_is_in_its_session(by: str, is_below: bool):
    """Its parent has ended. One that begins a session of its own is below nobody."""
    command = f'"{sys.executable}" made_program.py; touch $DONE'
    waits = f"DONE=$(mktemp -u); export DONE; ({by} sh -c '{command}' &) >&2; until [ -e $DONE ]; do sleep 0.1; done"
    (agent, made, _), _ = await processes_of(*says(call(waits), "of the program", "done"))

    assert made["program"].endswith("made_program.py")
    assert (agent["id"] in made["ancestors"]) is is_below


@pytest.mark.parametrize("method", ["fork", "spawn"])
async def test_a_process_that_the_agent_makes_of_itself_is_its_program(method: str):
    """Another process, the same program."""
    (agent, child), _ = await processes_of(*says("done", "of the child"), words=[method])

    assert child["id"] != agent["id"]
    assert agent["id"] in child["ancestors"]
    assert child["program"] == agent["program"]


async def test_a_connection_is_looked_up_once():
    """A later call on it costs no look, and is its first caller's, even if that has handed it on and ended."""
    (agent, later), _ = await processes_of(*says("done", "of the fork"), words=["hand_over"])

    assert later == agent


async def test_an_agent_that_connects_for_each_call_is_one_process():
    """Its second call is on a connection of its own."""
    found, _ = await processes_of(*says(call("true"), "done"), words=["reconnect"])

    assert len(found) == 2
    assert found[0] == found[1]


def test_a_process_has_one_start_though_clocks_drift(monkeypatch: pytest.MonkeyPatch):
    """The wall clock is corrected by 20 ms between two looks."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        ends = Ends(*client.getsockname(), *server.getsockname())
        first = find_processes([ends])
        now = time.time
        monkeypatch.setattr(time, "time", lambda: now() + 0.02)

        assert find_processes([ends]) == first != [None]


async def test_no_argument_of_a_process_is_recorded():
    """Keys stand in them."""
    secret = "s3cret-in-an-argument"
    command = f"'{sys.executable}' -c \"key = '{secret}'; import made_program\" {secret}"
    (_, made, _), record = await processes_of(*says(call(command), "of the program", "done"))

    assert made["program"].startswith(f"{PYTHON} -c ")
    assert secret not in json.dumps([turn["notes"] for turn in record["turns"]])


async def test_agents_at_once_are_told_apart():
    """A dozen connections come in one moment, each from a process of its own."""
    source = "import sys; input(); sys.path.insert(0, '.'); sys.argv[1:] = []; import calling_agent as a; a.main()"
    async with serving(*says("done")) as client:
        sessions = [await client.create() for _ in range(12)]

        async def start(session: Served) -> asyncio.subprocess.Process:
            env = {**os.environ, "OPENAI_BASE_URL": f"{session.base_url}/v1"}
            return await asyncio.create_subprocess_exec(
                *(sys.executable, "-S", "-c", source), env=env, cwd=PROGRAMS, stdin=asyncio.subprocess.PIPE
            )

        agents = [await start(session) for session in sessions]
        await asyncio.gather(*(agent.communicate(b"\n") for agent in agents))
        found = [await processes(client, session) for session in sessions]

    assert [process["id"].partition(".")[0] for [process] in found] == [str(agent.pid) for agent in agents]


async def test_a_client_that_has_gone_has_no_process():
    """Nor has one that is not on this machine, or is in another network namespace: no socket has its address."""
    lookups = PeerProcesses()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        here = listener.getsockname()
        with socket.create_connection(here) as client:
            ends = Ends(*client.getsockname(), *here)
            accepted, _ = listener.accept()
            there = await lookups.find(ends)
        with accepted:
            gone, elsewhere = await lookups.find(ends), await lookups.find(ends._replace(client="192.0.2.7"))
    await lookups.close()

    assert there is not None
    assert there.id.startswith(f"{os.getpid()}.")
    assert (gone, elsewhere) == (None, None)


async def test_a_lookup_that_was_killed_is_started_again():
    """The calls of the meantime have no process; nothing waits, and nothing stays behind."""
    before = set(psutil.Process().children())
    async with serving(*says("hello")) as client:
        sessions = [await client.create() for _ in range(3)]

        async def ask(session: Served) -> Json:
            async with RawClient(client.url) as raw:
                await raw.post(url_of(session), b'{"messages": [{"role": "user", "content": "hi"}]}')
            return (await processes(client, session))[0]

        first = await ask(sessions[0])
        [program] = set(psutil.Process().children()) - before
        program.send_signal(signal.SIGKILL)
        program.wait()
        meanwhile, afterwards = await ask(sessions[1]), await ask(sessions[2])

    assert (first["id"], meanwhile, afterwards["id"]) == (first["id"], None, first["id"])
    assert set(psutil.Process().children()) <= before  # some of another test may have ended
