"""However an agent, the engine or the server behaves: a typed outcome, and nothing left behind."""

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from harness.engines.scripted import ScriptedFault, ScriptStep
from harness.errors import Cause
from harness.rollouts.agents.task import AgentTask, FunctionAgent, ProgramAgent
from harness.rollouts.client.session_server import Deadlines, SessionFacts, SessionServerClient
from harness.rollouts.manager import SessionManager
from harness.samples.rollout import OutcomeKind
from harness.server.serving import RunningServer
from harness.server.settings import ServerSettings
from harness.types import SampleStatus
from tests.session_servers.scripted import canned_server, http_answer, scripted_server
from tests.session_servers.served import eventually

ASK = """
import json, os, sys, time, urllib.error, urllib.request

def ask(*texts):
    body = {"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": text} for text in texts]}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    headers = {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]

def leave(result):
    with open(os.environ["HARNESS_RESULT_FILE"], "w") as file:
        file.write(result)

"""

PATIENT = Deadlines(create_s=60, read_s=60, end_s=5, delete_s=30)
"""Only a turn that hangs costs its time."""


@asynccontextmanager
async def manager_of(
    *steps: ScriptStep, settings: ServerSettings | None = None
) -> AsyncIterator[tuple[SessionManager, RunningServer]]:
    """A manager of a server whose model says `steps`; no session is left at the end."""
    async with (
        scripted_server(*steps, settings=settings) as server,
        SessionManager(server.url, grace_s=0.3, deadlines=PATIENT) as manager,
    ):
        yield manager, server
        assert len(server.server.sessions) == 0


def program(workdir: Path, source: str, **changes: Any) -> AgentTask:
    """A task for a Python program that may use `ask` and `leave`."""
    agent = ProgramAgent("probe", (sys.executable, "-S", "-c", ASK + source))
    task = AgentTask(agent, "Say something.", workdir / "0", "scripted", deadline_s=30)
    return replace(task, **changes)


def function(workdir: Path, run: Any, **changes: Any) -> AgentTask:
    """A task for an async function."""
    task = AgentTask(FunctionAgent("probe", run), "Say something.", workdir / "0", "scripted", deadline_s=30)
    return replace(task, **changes)


async def chat(base_url: str, text: str) -> httpx.Response:
    """One model call."""
    body = {"model": "scripted", "messages": [{"role": "user", "content": text}]}
    async with httpx.AsyncClient(trust_env=False) as client:
        return await client.post(f"{base_url}/chat/completions", json=body, timeout=30)


async def test_a_program_runs_to_its_end(tmp_path: Path):
    """With its result, its log, the session's record and a sample for the trainer."""
    source = """
answer = ask(open(os.environ["HARNESS_INSTRUCTION_FILE"]).read())
print(answer)
leave(json.dumps({"heard": answer}))
"""
    task = program(tmp_path, source, metadata={"prompt": 7})
    async with manager_of(ScriptStep(text="Hello.")) as (manager, _):
        rollout = await manager.run(task)

    assert (rollout.outcome.kind, rollout.outcome.cause) == (OutcomeKind.FINISHED, None)
    assert rollout.agent_result == {"heard": "Hello."}
    assert (task.workdir / "agent.log").read_text() == "Hello.\n"
    assert rollout.session["session_id"] == rollout.session_id
    assert rollout.session["metadata"] == {"prompt": 7}
    assert [sample.status for sample in rollout.samples] == [SampleStatus.COMPLETED]
    [turn] = rollout.session["turns"]
    assert rollout.samples[0].tokens.size == turn["prompt_length"] + turn["output_length"]


async def test_a_program_starts_among_its_files_after_its_setup(tmp_path: Path):
    """Copies, in the directory that it names; a failed setup is an agent that did not start."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "word").write_text("Hello.")
    (tmp_path / "play.py").write_text(
        f"{ASK}\nleave(json.dumps([ask(open('../data/word').read()), os.path.basename(os.getcwd())]))"
    )
    agent = ProgramAgent(
        "probe",
        ("sh", "-c", '"$0" -S ../play.py && echo changed > ../data/word', sys.executable),
        setup=("sh", "-c", "test -f ../data/word && touch ready"),
        cwd="work",
        files={"play.py": tmp_path / "play.py", "data": tmp_path / "data"},
    )
    task = AgentTask(agent, "Say something.", tmp_path / "0", "scripted", deadline_s=30)
    failing = replace(task, agent=replace(agent, setup=("sh", "-c", "exit 3")), workdir=tmp_path / "1")
    async with manager_of(ScriptStep(text="Hello.")) as (manager, _):
        rollout, unready = await manager.run(task), await manager.run(failing)

    assert rollout.outcome.kind is OutcomeKind.GARBAGE  # a result is an object, and this one says where it ran
    assert json.loads((task.workdir / "result.json").read_text()) == ["Hello.", "work"]
    assert (task.workdir / "work" / "ready").exists()
    assert (task.workdir / "data" / "word").read_text() == "changed\n"
    assert (tmp_path / "data" / "word").read_text() == "Hello."
    assert (unready.outcome.kind, unready.outcome.cause) == (OutcomeKind.NOT_STARTED, Cause.AGENT)
    assert "setup ended with exit code 3" in (failing.workdir / "agent.log").read_text()
    assert not (failing.workdir / "result.json").exists()


async def test_a_program_has_its_key_from_a_file_and_what_it_runs_finds_none(tmp_path: Path):
    """Neither the key nor the address stand in the environment that its tools inherit."""
    source = """
import subprocess
told = json.load(open(os.environ["HOME"] + "/session.json"))
inherited = subprocess.run(["env"], stdout=subprocess.PIPE, text=True).stdout
os.environ.update(told)
leave(json.dumps({"heard": ask("Hello?"), "inherits": [each for each in told.values() if each in inherited]}))
"""
    names = ("OPENAI_BASE_URL", "OPENAI_API_KEY", "HARNESS_SESSION_ID")
    home = {"session.json": json.dumps({name: f"${{{name}}}" for name in names})}
    task = program(tmp_path, source)
    agent = replace(task.agent, home=home, key_in_environment=False)
    async with manager_of(ScriptStep(text="Hello.")) as (manager, _):
        rollout = await manager.run(replace(task, agent=agent))

    assert rollout.agent_result == {"heard": "Hello.", "inherits": []}, (task.workdir / "agent.log").read_text()


@pytest.mark.parametrize(
    ("part", "changes"),
    [
        ("prompt", {"prompt": "caf\udce9"}),
        ("metadata", {"metadata": {"file": "caf\udce9"}}),
        ("session", {"session": {"metadata": {"file": ["caf\udce9"]}}}),
    ],
)
async def test_a_lone_surrogate_is_an_outcome(tmp_path: Path, part: str, changes: dict[str, Any]):
    """What no file and no request can hold is the task's own fault, and nobody else's."""
    async with manager_of(ScriptStep(text="Hello.")) as (manager, _):
        rollout = await manager.run(program(tmp_path, "ask('Hello?')", **changes))
        assert (await manager.run(program(tmp_path, "ask('Hello?')"))).outcome.kind is OutcomeKind.FINISHED

    assert (rollout.outcome.kind, rollout.outcome.cause) == (OutcomeKind.NOT_STARTED, Cause.SCENARIO)
    assert rollout.outcome.detail.startswith(f"{part}: expected text, got a lone surrogate: ")


async def test_messages_that_are_no_json_are_an_outcome(tmp_path: Path):
    async with manager_of(ScriptStep(text="Hello.")) as (manager, _):
        rollout = await manager.run(program(tmp_path, "ask('Hello?')", prompt=[{"role": "user", "content": b"Hi"}]))

    assert (rollout.outcome.kind, rollout.outcome.cause) == (OutcomeKind.NOT_STARTED, Cause.SCENARIO)
    assert rollout.outcome.detail.startswith("prompt: expected JSON: ")


async def test_a_function_gets_messages_as_they_are(tmp_path: Path):
    """A list of them is what function agents of other frameworks expect."""
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello?"}]
    got: list[Any] = []

    async def run(base_url, prompt, request_kwargs, metadata, **kwargs):
        got.append(prompt)
        await chat(base_url, "Hello?")

    async with manager_of(ScriptStep(text="Hello.")) as (manager, _):
        rollout = await manager.run(function(tmp_path, run, prompt=messages))

    assert (rollout.outcome.kind, got) == (OutcomeKind.FINISHED, [messages])


async def test_a_path_that_is_none_is_an_outcome(tmp_path: Path):
    task = program(tmp_path / "a\0b", "ask('Hello?')")
    async with manager_of(ScriptStep(text="Hello.")) as (manager, _):
        rollout = await manager.run(task)

    assert rollout.outcome.kind is OutcomeKind.NOT_STARTED


async def test_a_model_call_that_outlives_its_agent_ends_with_it(tmp_path: Path):
    """Of a helper that the agent left behind: its tokens are undelivered, and the sample is the agent's."""
    left_behind: list[asyncio.Task[httpx.Response]] = []

    async def run(base_url, prompt, request_kwargs, metadata, **kwargs):
        await chat(base_url, prompt)
        left_behind.append(asyncio.create_task(chat(base_url, "and this takes for ever")))
        await eventually(lambda: any(live.sampled for live in server.server._turns.engine.live))

    slow = ScriptStep(text="a long story", fault=ScriptedFault.HANG, fault_after=4, token_delay_s=0.01)
    async with manager_of(ScriptStep(text="Hello."), slow) as (manager, server):
        rollout = await manager.run(function(tmp_path, run))
        late = await left_behind[0]

    [sample] = rollout.samples
    ledger = rollout.session["ledger"]
    assert (rollout.outcome.kind, late.status_code) == (OutcomeKind.FINISHED, 404)
    assert (rollout.session["turns_in_flight"], sample.metadata["turns"]) == (0, [0])
    assert ledger["generated"] == ledger["trained"] + ledger["dropped"]["undelivered"] > ledger["trained"]


async def test_a_function_runs_to_its_end(tmp_path: Path):
    """By the contract `run(base_url, prompt, request_kwargs, metadata, **kwargs)`."""
    seen: dict[str, Any] = {}

    async def run(base_url, prompt, request_kwargs, metadata, **kwargs):
        seen.update(request_kwargs=request_kwargs, metadata=metadata, kwargs=kwargs)
        answer = await chat(base_url, prompt)
        return {"status": answer.status_code}

    task = function(tmp_path, run, request_kwargs={"temperature": 0.5}, metadata={"prompt": 7})
    async with manager_of() as (manager, _):
        rollout = await manager.run(task)

    assert (rollout.outcome.kind, rollout.agent_result) == (OutcomeKind.FINISHED, {"status": 200})
    assert seen["request_kwargs"] == {"model": "scripted", "temperature": 0.5}
    assert seen["metadata"] == {"prompt": 7}
    assert seen["kwargs"]["session_id"] == rollout.session_id


async def test_a_reward_that_no_float_holds_ends_no_rollout(tmp_path: Path):
    async def run(base_url, prompt, **kwargs):
        await chat(base_url, prompt)
        return {"reward": 10**400}

    async with manager_of() as (manager, _):
        rollout = await manager.run(function(tmp_path, run))

    assert rollout.outcome.kind is OutcomeKind.FINISHED


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ("ask('Hi'); sys.exit(3)", OutcomeKind.CRASHED),
        ("ask('Hi'); os.kill(os.getpid(), 11)", OutcomeKind.CRASHED),
        ("ask('Hi'); raise KeyError('x')", OutcomeKind.CRASHED),
        ("sys.exit(0)", OutcomeKind.NO_MODEL_CALL),
        ("ask('Hi'); leave('no json')", OutcomeKind.GARBAGE),
        ("ask('Hi'); leave('[1]')", OutcomeKind.GARBAGE),
        ("ask('Hi'); leave('{}' + ' ' * (2 << 20))", OutcomeKind.GARBAGE),
        ("ask('Hi'); open(os.environ['HARNESS_RESULT_FILE'], 'wb').write(b'\\xff')", OutcomeKind.GARBAGE),
        ("sys.exit(127)", OutcomeKind.NOT_STARTED),
    ],
)
async def test_what_a_program_does_wrong_is_its_own_fault(tmp_path: Path, source: str, kind: OutcomeKind):
    async with manager_of() as (manager, _):
        rollout = await manager.run(program(tmp_path, source))

    assert (rollout.outcome.kind, rollout.outcome.cause, rollout.agent_result) == (kind, Cause.AGENT, None)


async def test_a_function_that_raises_has_crashed(tmp_path: Path):
    async def run(base_url, prompt, **kwargs):
        await chat(base_url, prompt)
        raise KeyError("missing")

    task = function(tmp_path, run)
    async with manager_of() as (manager, _):
        rollout = await manager.run(task)

    assert (rollout.outcome.kind, rollout.outcome.cause) == (OutcomeKind.CRASHED, Cause.AGENT)
    assert "KeyError: 'missing'" in rollout.outcome.detail
    assert "Traceback" in (task.workdir / "agent.log").read_text()


async def _exits(**kwargs):
    sys.exit(2)


async def _cancels_itself(**kwargs):
    raise asyncio.CancelledError


async def _takes_no_arguments():
    pass


def _is_not_async(**kwargs):
    return {}


@pytest.mark.parametrize("run", [_exits, _cancels_itself, _takes_no_arguments, _is_not_async])
async def test_no_function_can_take_the_run_down(tmp_path: Path, run: Any):
    async with manager_of() as (manager, _):
        rollout = await manager.run(function(tmp_path, run))

    assert rollout.outcome.kind is OutcomeKind.CRASHED


async def test_a_program_that_hangs_is_stopped_at_its_deadline(tmp_path: Path):
    """Its turns are kept; on a busy machine it needs a longer deadline to come to one."""
    async with manager_of() as (manager, _):
        for deadline_s in (1.5, 6, 24):
            started = time.monotonic()
            rollout = await manager.run(program(tmp_path, "ask('Hi'); time.sleep(300)", deadline_s=deadline_s))
            assert (rollout.outcome.kind, rollout.outcome.cause) == (OutcomeKind.TIMED_OUT, Cause.LIMIT)
            assert time.monotonic() - started < 200
            if rollout.samples:
                break

    assert len(rollout.samples) == 1


async def test_a_function_that_swallows_its_cancellation_does_not_hold_up_the_run(tmp_path: Path):
    """It is reported after a bounded wait, and ended with the manager."""
    cancellations = 0

    async def run(**kwargs):
        nonlocal cancellations
        while cancellations < 2:
            try:
                await asyncio.sleep(300)
            except asyncio.CancelledError:
                cancellations += 1

    async with manager_of() as (manager, _):
        rollout = await manager.run(function(tmp_path, run, deadline_s=0.2))
        assert cancellations == 1

    assert rollout.outcome.kind is OutcomeKind.TIMED_OUT
    assert "ignores its cancellation" in rollout.outcome.detail
    assert cancellations == 2


async def test_a_function_that_never_obeys_its_cancellation_ends_with_the_manager(tmp_path: Path):
    """Closed where it stands: a loop that waited for it would never end."""
    ended = asyncio.Event()

    async def run(**kwargs):
        try:
            while True:
                with suppress(asyncio.CancelledError):
                    await asyncio.sleep(300)
        finally:
            ended.set()

    async with manager_of(tmp_path) as (manager, _):
        rollout = await manager.run(function(tmp_path, run, deadline_s=0.2))
        assert not ended.is_set()

    assert rollout.outcome.kind is OutcomeKind.TIMED_OUT
    assert ended.is_set()
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_turn_in_flight_when_the_agent_is_stopped_is_recorded(tmp_path: Path):
    """The engine sampled its tokens, so they must be accounted for."""
    slow = ScriptStep(text="A slow answer. " * 20, token_delay_s=0.2)
    async with manager_of(slow) as (manager, _):
        for deadline_s in (1.5, 6, 24):  # as above
            rollout = await manager.run(program(tmp_path, "ask('Hi')", deadline_s=deadline_s))
            assert rollout.outcome.kind is OutcomeKind.TIMED_OUT
            if rollout.session["turns"]:
                break

    assert len(rollout.session["turns"]) == 1
    assert rollout.session["ledger"]["generated"] > 0


@pytest.mark.parametrize("command", [("/no/such/agent",), ("no-such-agent",), ("/etc/passwd",)])
async def test_an_agent_that_does_not_exist_is_not_started(tmp_path: Path, command: tuple[str, ...]):
    task = AgentTask(ProgramAgent("probe", command), "Hi", tmp_path / "0", "scripted")
    async with manager_of() as (manager, _):
        rollout = await manager.run(task)

    assert (rollout.outcome.kind, rollout.outcome.cause) == (OutcomeKind.NOT_STARTED, Cause.AGENT)
    assert command[0] in rollout.outcome.detail


async def test_a_working_directory_that_cannot_be_made_is_our_fault(tmp_path: Path):
    (tmp_path / "file").touch()
    async with manager_of() as (manager, _):
        rollout = await manager.run(program(tmp_path / "file", "ask('Hi')"))

    assert (rollout.outcome.kind, rollout.outcome.cause) == (OutcomeKind.NOT_STARTED, Cause.HARNESS)


@pytest.mark.parametrize("end", ["", "sys.exit(1)"])
async def test_an_agent_at_the_limit_of_its_session_is_not_to_blame(tmp_path: Path, end: str):
    source = f"""
ask("one")
try:
    ask("two")
except urllib.error.HTTPError as error:
    assert error.code == 404
    {end or "pass"}
"""
    async with manager_of() as (manager, _):
        rollout = await manager.run(program(tmp_path, source, session={"limits": {"turns": 1}}))

    assert (rollout.outcome.kind, rollout.outcome.cause) == (OutcomeKind.LIMITED, Cause.LIMIT)


async def test_an_agent_is_not_to_blame_for_a_failing_engine(tmp_path: Path):
    async with manager_of(ScriptStep(fault=ScriptedFault.UNAVAILABLE)) as (manager, _):
        rollout = await manager.run(program(tmp_path, "ask('Hi')"))

    assert (rollout.outcome.kind, rollout.outcome.cause) == (OutcomeKind.ENGINE_FAILED, Cause.ENGINE)


async def test_a_rollout_that_meets_a_shut_gate_waits_and_then_gives_up(tmp_path: Path):
    """It is data of the run, to be repeated by a resumed one."""
    async with scripted_server() as server, SessionManager(server.url, deadlines=Deadlines(create_s=3)) as manager:
        await post(server.url, "/sessions/drain")
        rollout = await manager.run(program(tmp_path, "ask('Hi')"))

    assert (rollout.outcome.kind, rollout.outcome.cause) == (OutcomeKind.DRAINED, Cause.LIMIT)
    assert (rollout.session_id, rollout.session["turns"], rollout.samples) == (None, [], ())


async def test_an_impossible_session_is_the_scenarios_fault(tmp_path: Path):
    async with manager_of() as (manager, _):
        rollout = await manager.run(program(tmp_path, "ask('Hi')", session={"limits": {"turns": "many"}}))

    assert (rollout.outcome.kind, rollout.outcome.cause) == (OutcomeKind.NOT_STARTED, Cause.SCENARIO)
    assert "limits.turns" in rollout.outcome.detail


async def test_a_server_that_is_not_there_is_our_fault(tmp_path: Path):
    async with SessionManager("http://127.0.0.1:9", deadlines=Deadlines(create_s=1)) as manager:
        rollout = await manager.run(program(tmp_path, "ask('Hi')"))

    assert (rollout.outcome.kind, rollout.outcome.cause) == (OutcomeKind.HARNESS_FAILED, Cause.HARNESS)
    assert not (tmp_path / "0").exists()


@pytest.mark.parametrize(
    "record",
    [
        http_answer(500, {"error": {"message": "bug", "code": "internal_error"}}),
        http_answer(200, {"turns": "none"}),
        http_answer(200, {"turns": {}, "samples": [{"tokens": [1]}]}),
    ],
)
async def test_a_record_that_cannot_be_read_costs_one_rollout(tmp_path: Path, record: bytes):
    """The agent ran, its session is lost, the run continues."""
    created = http_answer(200, {"session_id": "a1", "base_url": "http://127.0.0.1:9", "api_key": "k"})
    async with canned_server(created, record) as server, SessionManager(server.url, deadlines=PATIENT) as manager:
        rollout = await manager.run(program(tmp_path, ""))

    assert (rollout.outcome.kind, rollout.outcome.cause) == (OutcomeKind.HARNESS_FAILED, Cause.HARNESS)
    assert "session not readable" in rollout.outcome.detail


async def test_cancelling_a_rollout_ends_its_agent_and_gives_the_session_back(tmp_path: Path, survivors):
    source = "leave(json.dumps({'pid': os.getpid()})); time.sleep(300)"
    task = program(tmp_path, source)
    async with manager_of() as (manager, _):
        rollout = asyncio.create_task(manager.run(task))
        while not (result := read_text(task.workdir / "result.json")):
            await asyncio.sleep(0.01)
        rollout.cancel()
        with pytest.raises(asyncio.CancelledError):
            await rollout

        assert survivors([json.loads(result)["pid"]]) == []


async def test_a_session_that_was_on_its_way_when_its_rollout_was_cancelled_is_given_back(tmp_path: Path):
    """The server made it, and nobody would ever delete it."""
    async with manager_of() as (manager, server):
        await post(server.url, "/sessions/pause")
        rollout = asyncio.create_task(manager.run(program(tmp_path, "")))
        await eventually(lambda: bool(server.server.gatekeeper.held))
        rollout.cancel()
        await asyncio.sleep(0)  # it is told
        await post(server.url, "/sessions/resume")
        with pytest.raises(asyncio.CancelledError):
            await rollout


async def test_a_rollout_that_waits_for_the_gate_is_cancelled_at_once(tmp_path: Path):
    shut = http_answer(503, {"error": {"code": "gate_closed"}}, "retry-after: 60")
    patient = replace(PATIENT, create_s=300)
    async with canned_server(shut) as server, SessionManager(server.url, deadlines=patient) as manager:
        rollout = asyncio.create_task(manager.run(program(tmp_path, "")))
        await eventually(lambda: bool(server.requests))
        rollout.cancel()
        with pytest.raises(asyncio.CancelledError):
            await rollout

    assert server.requests == ["POST /sessions"]


async def test_cancelling_a_function_reaches_the_function(tmp_path: Path):
    events: list[str] = []

    async def run(**kwargs):
        events.append("started")
        try:
            await asyncio.sleep(300)
        finally:
            events.append("cleaned up")

    async with manager_of() as (manager, _):
        rollout = asyncio.create_task(manager.run(function(tmp_path, run)))
        await eventually(lambda: bool(events))
        rollout.cancel()
        with pytest.raises(asyncio.CancelledError):
            await rollout

        assert events == ["started", "cleaned up"]


async def test_rollouts_at_once_leave_no_process_and_no_file(tmp_path: Path):
    sources = {"ask('Hi')": 60, "sys.exit(1)": 60, "print('x' * 3_000_000)": 60, "ask('Hi'); time.sleep(300)": 4}
    before = resources()
    async with scripted_server() as server, SessionManager(server.url, grace_s=0.3, deadlines=PATIENT) as manager:
        tasks = [
            program(tmp_path / str(n), source, deadline_s=deadline_s)
            for n, (source, deadline_s) in enumerate([*sources.items()] * 2)
        ]
        rollouts = await asyncio.gather(*(manager.run(task) for task in tasks))
    # Closed connections are noticed at the other end, those of the test before as well.
    await eventually(lambda: all(now <= then for now, then in zip(resources(), before, strict=True)))

    kinds = [OutcomeKind.FINISHED, OutcomeKind.CRASHED, OutcomeKind.NO_MODEL_CALL, OutcomeKind.TIMED_OUT]
    assert [rollout.outcome.kind for rollout in rollouts] == kinds * 2


def resources() -> tuple[int, int, int]:
    """Open files, child processes and tasks of this process."""
    process = psutil.Process()
    return process.num_fds(), len(process.children(recursive=True)), len(asyncio.all_tasks())


async def post(url: str, path: str) -> None:
    """An admin verb."""
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=30) as client:
        (await client.post(path)).raise_for_status()


def read_text(path: Path) -> str:
    """The text of a file that may not be there yet."""
    return path.read_text() if path.exists() else ""


async def test_a_manager_keeps_to_the_deadlines_of_the_client_that_it_is_given(tmp_path: Path):
    """Those of a run on a server of others were dropped between the two."""
    asked: list[float] = []

    class Noting(SessionServerClient):
        async def end(self, session_id: str, *, within_s: float) -> SessionFacts:
            asked.append(within_s)
            return await super().end(session_id, within_s=within_s)

    async def run(base_url, prompt, **kwargs):
        await chat(base_url, prompt)

    async with (
        manager_of() as (_, server),
        Noting(server.url, deadlines=replace(PATIENT, end_s=3)) as client,
        SessionManager(server.url, client=client) as manager,
    ):
        await manager.run(function(tmp_path, run))

    assert asked == [3]
