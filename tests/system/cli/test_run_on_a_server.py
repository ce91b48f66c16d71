"""`harness run --server`: a suite on a session server that runs already, and that others use too.

Whatever becomes of the run or of the server, the sessions of others, the gate and the engines are as they were, and
every token of the run's own sessions is accounted for.
"""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness.engines.scripted import Script, ScriptedEngine
from harness.errors import EngineUnavailable, RunError, ScenarioError, SessionServerError
from harness.rollouts.client.session_server import Deadlines
from harness.server.settings import ServerSettings
from harness.suite.record.config import Overrides
from harness.suite.record.rollout_table import read_rollouts
from harness.suite.run.interrupts import Interrupts
from harness.suite.run.open_run import OpenedRun, begin_run, resume_run
from harness.suite.run.read_run import read_run
from harness.suite.run.report import RunReport, RunStatus
from harness.suite.run.runner import SuiteRun
from harness.types import Json
from tests.builders import toy_tokenizer, user
from tests.free_ports import free_ports
from tests.harness_command import (
    AGENT,
    SCRIPT,
    announced,
    harness,
    make_quick,
    start_harness,
    wait,
    wait_for,
    write_scenario,
)
from tests.played_suites import Silence, play
from tests.session_servers.served import Client, Served, serving_with

pytestmark = pytest.mark.agent

TOKEN = "t0ken"
SETTINGS = ServerSettings(admin_token=TOKEN)
HASTY = Deadlines(create_s=10, attempt_s=5, read_s=2, end_s=1, delete_s=2)
START_S = 120
"""For a process that imports everything, and agents one after the other, on a busy machine."""
ENDLESS = [{"metadata": {"turns": 2}}, {"metadata": {"turns": 4000, "pause_s": 0.05}}]
"""Two sessions that end at once, then two that continue until they are refused."""


@dataclass
class Neighbor:
    """Somebody else's session on the server; it has had a turn before the run came."""

    client: Client[ScriptedEngine]
    session: Served
    messages: list[Json] = field(default_factory=lambda: [user("I was here first.")])

    async def talk(self) -> None:
        answer = await self.client.say(self.session, self.messages)
        self.messages += [answer, user("Go on.")]

    async def is_undisturbed(self) -> bool:
        """Its turns are all there, it is the only session, takes another turn, and the gate was never touched."""
        listed = (await self.client.http.get("/sessions")).json()["sessions"]
        turns = len(self.messages) // 2
        await self.talk()
        gate = await self.client.gate()
        return [(each["session_id"], each["phase"], each["turns"]) for each in listed] == [
            (self.session.session_id, "open", turns)
        ] and (gate["state"], gate["epoch"], gate["holds"]) == ("open", 0, [])


@asynccontextmanager
async def server(
    store: Path | str = "memory", *, port: int = 0, script: dict[str, Any] = SCRIPT
) -> AsyncIterator[Client[ScriptedEngine]]:
    """A session server whose engine says what that of the scenario says."""
    engine = ScriptedEngine(toy_tokenizer(), msgspec.convert(script, Script))
    settings = ServerSettings(admin_token=TOKEN, port=port, stop_grace_s=0.0)
    async with serving_with(engine, store=store, settings=settings) as client:
        yield client


@asynccontextmanager
async def shared_server(store: Path | str = "memory") -> AsyncIterator[tuple[Client[ScriptedEngine], Neighbor]]:
    async with server(store) as client:
        neighbor = Neighbor(client, await client.create())
        await neighbor.talk()
        yield client, neighbor


async def run(
    opened: OpenedRun,
    interrupts: Interrupts | None = None,
    *,
    token: str | None = TOKEN,
    width: int | None = None,
    deadlines: Deadlines | None = None,
) -> RunReport:
    """Execute `opened` in this process."""
    suite_run = SuiteRun(
        opened.selection,
        opened.directory,
        Silence(),
        interrupts or Interrupts(),
        width,
        admin_token=token,
        deadlines=deadlines,
    )
    return await suite_run.execute()


async def until_they_talk(directory: Path, *numbers: int) -> None:
    """Return when the agents of these rollouts have had a few turns."""
    for number in numbers:
        log = directory / "sessions" / str(number) / "agent.log"
        await asyncio.to_thread(wait_for, log, "Two and more.", START_S)


def exported(directory: Path) -> list[dict[str, Any]]:
    """The samples of a run, without what names its sessions."""
    samples = [json.loads(line) for line in (directory / "samples.jsonl").read_text().splitlines()]
    for sample in samples:
        sample["metadata"].pop("session_id")
    return samples


def on(client: Client[ScriptedEngine]) -> Overrides:
    return Overrides(server=client.url)


async def test_a_run_on_a_server_is_the_run_on_an_engine_of_its_own(tmp_path: Path):
    """The same samples, rewards, report and books; nothing of it is left on the server, and nobody noticed."""
    scenario = write_scenario(tmp_path / "s", checks={"min_finished": 4})
    await play(scenario, tmp_path / "own")
    async with shared_server() as (client, neighbor):
        report = await run(begin_run(str(scenario), on(client), tmp_path / "run"))
        undisturbed = await neighbor.is_undisturbed()
        described = (await client.http.get("/sessions/server")).json()
    own, attached = [json.loads((tmp_path / name / "result.json").read_text()) for name in ("own", "run")]
    lock = json.loads((tmp_path / "run" / "lock.json").read_text())
    recorded = read_run(tmp_path / "run")

    assert report.status is RunStatus.PASSED
    assert undisturbed
    assert exported(tmp_path / "run") == exported(tmp_path / "own")
    assert attached["ledger"] == own["ledger"]
    assert attached["ledger"]["generated"] > 0
    assert own["witness"]["agrees"] is True
    shared = {"tokens": attached["ledger"]["generated"], "reason": "others use the server that it ran on"}
    assert (attached["witness"]["agrees"], attached["witness"]["not_comparable"]) == (None, [shared])
    *checks, witness = own["scenarios"][0]["checks"]
    assert (attached["scenarios"][0]["checks"], witness["check"]) == (checks, "expect_witness_agrees")
    assert lock["digests"] == {f"server={client.url}": described["serves"]}
    assert lock["engines"] == {f"server={client.url}": ["scripted"]}
    assert recorded.ledger == report.ledger


async def test_the_digests_of_a_server_are_those_that_a_run_of_its_own_finds(tmp_path: Path):
    """Whoever serves: the same folder has the same digests, so that runs can be compared."""
    scenario = write_scenario(tmp_path / "s")
    ended = await asyncio.to_thread(harness, "run", scenario, "--out", tmp_path / "own")
    toy = tmp_path / "toy"
    arguments = ("--engine", "scripted", "--script", scenario / "script.toml", "--tokenizer", toy, "--port", "0")
    process = start_harness("serve", *arguments, "--json", env={"HARNESS_ADMIN_TOKEN": TOKEN})
    try:
        url = (await asyncio.to_thread(announced, process))["url"]
        attached = await asyncio.to_thread(
            lambda: harness(
                "run", scenario, "--server", url + "/", "--out", tmp_path / "run", env={"HARNESS_ADMIN_TOKEN": TOKEN}
            )
        )
        wrong = await asyncio.to_thread(
            lambda: harness("run", scenario, "--server", url, "--admin-token", "x", "--out", tmp_path / "wrong")
        )
    finally:
        process.send_signal(signal.SIGTERM)
        wait(process)
    own, there = [json.loads((tmp_path / name / "lock.json").read_text())["digests"] for name in ("own", "run")]
    program = "".join(path.read_text() for path in (tmp_path / "run" / "sessions").glob("*/agent.log"))

    assert (ended.code, attached.code) == (0, 0), attached.stderr
    assert list(there.values()) == list(own.values())
    assert "user       Say something." in attached.stdout
    assert (wrong.code, "another one was given" in wrong.stderr) == (4, True)
    assert TOKEN not in program + (tmp_path / "run" / "config.toml").read_text()


async def test_a_server_that_cannot_be_used_is_one_error(tmp_path: Path):
    """Before an agent starts: nobody there, no token, a server of something else, or without the wanted guard."""
    scenario = str(write_scenario(tmp_path / "s"))
    engine = {"name": "scripted", "repeat_guard": {"max_consecutive_token_repeats": 7}}
    guarded = str(write_scenario(tmp_path / "guarded", engine=engine))

    async def refuse_all(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        await writer.drain()
        writer.close()

    other = await asyncio.start_server(refuse_all, "127.0.0.1", 0)
    other_url = f"http://127.0.0.1:{other.sockets[0].getsockname()[1]}"
    async with other, server() as client:
        with pytest.raises(
            ScenarioError, match=r"expected the server's admin token in --admin-token .* none was given"
        ):
            await run(begin_run(scenario, on(client), tmp_path / "a"), token=None)
        with pytest.raises(ScenarioError, match="expected `harness serve` or `harness router` of this version"):
            await run(begin_run(scenario, Overrides(server=other_url), tmp_path / "b"))
        with pytest.raises(ScenarioError, match=r"wants the repeat guard .* engine runs none"):
            await run(begin_run(guarded, on(client), tmp_path / "d"))
    with pytest.raises(SessionServerError, match=rf"--server {client.url} cannot be used"):
        await run(begin_run(scenario, on(client), tmp_path / "c"), deadlines=HASTY)

    assert not list(tmp_path.glob("[abcd]/sessions/*"))


async def test_what_the_engine_did_not_hand_over_is_in_the_report(tmp_path: Path):
    """Its connection breaks in each first turn, which continues from what came: what was lost is beside the sum."""
    steps = [{"text": "Lost.", "fault": "disconnect", "fault_after": 2}, *SCRIPT["steps"]]
    scenario = write_scenario(tmp_path / "s")
    async with server(script={"steps": steps}) as client:
        report = await run(begin_run(str(scenario), on(client), tmp_path / "run"))

    assert report.status is RunStatus.PASSED
    assert (report.ledger.difference, report.ledger.unknown.requests) == (0, 4)
    assert read_run(tmp_path / "run").ledger == report.ledger


async def test_a_killed_run_leaves_sessions_that_its_resume_counts_and_deletes(tmp_path: Path):
    """`kill -9`: what had finished is not run again, the tokens of the others are `interrupted`, and nobody else's."""
    scenario = write_scenario(tmp_path / "s", prompts=ENDLESS)
    async with shared_server() as (client, neighbor):
        process = start_harness(
            *("run", scenario, "--server", client.url, "--out", tmp_path / "run", "-n", "2"),
            env={"HARNESS_ADMIN_TOKEN": TOKEN},
            log=tmp_path / "log",
        )
        await until_they_talk(tmp_path / "run", 2, 3)
        os.killpg(process.pid, signal.SIGKILL)
        await asyncio.to_thread(process.communicate)
        before = read_rollouts(tmp_path / "run" / "run.db")
        left = len(client.server.sessions)
        sampled = sum(each.ledger().generated for each in client.server.sessions if each.config.metadata)
        make_quick(scenario, tmp_path / "run")
        with pytest.raises(RunError, match=r"overrides.server: .* -> 'http://127.0.0.1:1'"):
            resume_run(str(tmp_path / "run"), Overrides(server="http://127.0.0.1:1"), None)
        report = await run(resume_run(str(tmp_path / "run"), Overrides(), None))
        undisturbed = await neighbor.is_undisturbed()
    after = read_rollouts(tmp_path / "run" / "run.db")

    assert (sorted(before), left) == ([0, 1], 3)
    assert {number: after[number].session_id for number in before} == {n: each.session_id for n, each in before.items()}
    assert (report.status, undisturbed) == (RunStatus.PASSED, True)
    assert report.ledger.difference == 0
    assert 0 < sampled <= report.ledger.dropped["interrupted"]


@pytest.mark.parametrize(("times", "later"), [(1, ["drained"] * 2), (2, [])])
async def test_an_interrupted_run_drains_itself_and_nobody_else(tmp_path: Path, times: int, later: list[str]):
    """Once, its agents stop at their next call; twice, they are ended, and the tokens that this cuts are in the books.

    The gate stays open, and the others' sessions take turns meanwhile.
    """
    scenario = write_scenario(tmp_path / "s", prompts=ENDLESS)
    interrupts = Interrupts()
    async with shared_server() as (client, neighbor):
        opened = begin_run(str(scenario), on(client), tmp_path / "run")
        running = asyncio.create_task(run(opened, interrupts, width=2))
        await until_they_talk(tmp_path / "run", 2, 3)
        for _ in range(times):
            interrupts.request()
        await neighbor.talk()
        report = await running
        undisturbed = await neighbor.is_undisturbed()
    outcomes = [record.outcome for record in read_rollouts(tmp_path / "run" / "run.db").values()]

    assert (report.status, undisturbed) == (RunStatus.INTERRUPTED, True)
    assert outcomes == ["finished", "finished", *later]
    assert report.ledger.dropped["interrupted"] > 0


async def test_a_crashed_rollout_goes_on_and_is_forked_by_command(tmp_path: Path):
    """From its record in the store of the server, which samples its first turn once; nothing is left there."""
    allowed = tmp_path / "allowed"
    program = AGENT.replace("    turns += 1\n", f"    turns += 1\n    pathlib.Path({str(allowed)!r}).stat()\n")
    scenario = write_scenario(tmp_path / "s", program=program, samples_per_prompt=1, prompts=[{}])
    async with server(tmp_path / "server.db") as client:
        await run(begin_run(str(scenario), on(client), tmp_path / "run"))
        [crashed] = read_rollouts(tmp_path / "run" / "run.db").values()
        allowed.touch()
        token = {"HARNESS_ADMIN_TOKEN": TOKEN}
        resumed = await asyncio.to_thread(harness, "resume", tmp_path / "run", "0", "--json", env=token)
        forked = await asyncio.to_thread(
            harness, "fork", tmp_path / "run", "0", "--at", "1", "-n", "2", "--json", env=token
        )
        left = len(client.server.sessions)
    [record] = read_rollouts(tmp_path / "run" / "run.db").values()
    [sample] = record.export_samples()

    assert (crashed.outcome, resumed.code, record.outcome) == ("crashed", 0, "finished"), resumed.stderr
    assert sample.metadata["turns"] == [0, 1]
    assert record.ledger.inherited == crashed.ledger.generated
    assert resumed.document["ledger"]["generated"] == int(sample.loss_mask.sum())
    assert (forked.code, left) == (0, 0), forked.stderr
    for fork in forked.document["forks"]:
        assert (fork["outcome"], fork["turns"], fork["difference"]) == ("finished", 2, None)
        assert 0 < fork["trained"] < int(sample.loss_mask.sum())


async def test_a_server_that_goes_away_ends_the_run_which_goes_on_at_its_successor(tmp_path: Path):
    """The rollouts that it failed are nobody's fault, and continue from the records in its store.

    They are found by the run's own number, whatever the prompts' metadata say.
    """
    prompts = [{"metadata": {**prompt["metadata"], "rollout": 9}} for prompt in ENDLESS]
    scenario = write_scenario(tmp_path / "s", prompts=prompts)
    store, port = tmp_path / "server.db", free_ports()
    async with server(store, port=port) as client:
        opened = begin_run(str(scenario), on(client), tmp_path / "run")
        running = asyncio.create_task(run(opened, width=2, deadlines=HASTY))
        await until_they_talk(tmp_path / "run", 2, 3)
    with pytest.raises(SessionServerError):
        await running
    before = read_rollouts(tmp_path / "run" / "run.db")
    make_quick(scenario, tmp_path / "run")
    async with server(store, port=port) as client:
        report = await run(resume_run(str(tmp_path / "run"), Overrides(), None))
        left, sampled = len(client.server.sessions), client.engine.played
    after = read_rollouts(tmp_path / "run" / "run.db")

    assert {before[number].is_final for number in (0, 1)} == {True}
    assert not any(record.is_final for number, record in before.items() if number > 1)
    assert (report.status, left) == (RunStatus.PASSED, 0)
    assert report.ledger.difference == 0
    assert "interrupted" not in report.ledger.dropped
    assert all(after[number].ledger.inherited > 0 for number in (2, 3))
    assert sum(sampled.values()) <= 2  # a third turn, of one that had two


async def test_another_model_at_the_same_address_is_refused(tmp_path: Path):
    """Samples of two models would be in one set: a resume at a server that serves something else does not begin."""
    scenario = write_scenario(tmp_path / "s", prompts=ENDLESS)
    interrupts, port = Interrupts(), free_ports()
    async with server(port=port) as client:
        opened = begin_run(str(scenario), on(client), tmp_path / "run")
        running = asyncio.create_task(run(opened, interrupts, width=2))
        await until_they_talk(tmp_path / "run", 2, 3)
        interrupts.request()
        await running
    other = ScriptedEngine(toy_tokenizer(), msgspec.convert(SCRIPT, Script), model="another")
    async with serving_with(other, settings=ServerSettings(admin_token=TOKEN, port=port)):
        with pytest.raises((RunError, EngineUnavailable), match="another"):
            await run(resume_run(str(tmp_path / "run"), Overrides(), None))


async def test_a_rollout_that_two_models_have_served_does_not_count(tmp_path: Path):
    """Its agent asked until the address answered again, and finished: on the words of both."""
    patient = AGENT.replace(
        "    except urllib.error.HTTPError as error:",
        "    except OSError as error:\n        if getattr(error, 'code', 503) == 503:  # it stops, or is not there\n"
        "            time.sleep(0.1)\n            continue",
    )
    agent = {"profile": "agent.py", "deadline_s": 240.0}
    prompts = [{"metadata": {"turns": 40, "pause_s": 0.1}}]
    scenario = write_scenario(tmp_path / "s", program=patient, agent=agent, prompts=prompts, samples_per_prompt=1)
    store, port = tmp_path / "server.db", free_ports()
    async with server(store, port=port) as client:
        running = asyncio.create_task(run(begin_run(str(scenario), on(client), tmp_path / "run")))
        await until_they_talk(tmp_path / "run", 0)
    other = ScriptedEngine(toy_tokenizer(), msgspec.convert(SCRIPT, Script), model="another")
    async with serving_with(other, store=store, settings=ServerSettings(admin_token=TOKEN, port=port)):
        with pytest.raises(EngineUnavailable, match="another"):
            await running
    [record] = read_rollouts(tmp_path / "run" / "run.db").values()

    assert (record.agent_result, record.is_final) == ({"turns": 40}, False)
