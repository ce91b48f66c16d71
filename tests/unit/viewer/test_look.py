"""A run, a store and a session, looked at: whole, half written, damaged, hostile and in use."""

import asyncio
import json
import os
import re
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from harness.cli.look.show import show
from harness.engines.scripted import ScriptStep
from harness.errors import Cause, RunError, SessionServerError
from harness.samples.rollout import OutcomeKind
from harness.server.settings import ServerSettings
from harness.server.store.sqlite import read_session
from harness.sessions.record import session_record
from harness.suite.record.attached_sessions import AttachedSessions
from harness.suite.record.config import Overrides, select
from harness.suite.record.rollout_table import RecordedSession, RolloutLog
from harness.suite.record.rundir import RunDirectory, note_engine, note_start
from harness.tokens.tokenizer import Tokenizer
from harness.types import Json
from harness.viewer.look import look_at, look_into
from tests.builders import assistant, user
from tests.harness_command import write_scenario
from tests.recorded_runs import rollout_record
from tests.session_servers.served import Client, says, serving

ESCAPES = "\x1b[2J\x1b]0;owned\x07 and \u202eright to left\u2066 and \x9b1m"
WORDS = f"Hello.\nNext {ESCAPES} line"


async def converse(client: Client[Any], *, says_back: str = "Go on.") -> Json:
    """A session of two turns and a fork, as its record."""
    session = await client.create()
    first = await client.say(session, [user("Begin.")])
    await client.say(session, [user("Begin."), first, user(says_back)])
    await client.say(session, [user("Begin."), first, user("Or else?")])
    return await client.record(session)


@pytest.fixture(name="run")
async def _run(tmp_path: Path) -> RunDirectory:
    """A run of one rollout, whose agent crashed."""
    folder = write_scenario(tmp_path / "small")
    directory = RunDirectory.create(tmp_path / "run", select(str(folder), Overrides()).config)
    async with serving(*says("One.", WORDS, "Three."), store=directory.database) as client:
        record = await converse(client, says_back=WORDS)
    rollout = rollout_record(
        session_id=record["session_id"],
        outcome=OutcomeKind.CRASHED,
        cause=Cause.AGENT,
        detail="exit code 1",
        agent_result={"answer": ESCAPES},
        reward=0.0,
        figures={"tests": 3.0},
        reason=f"3 of 7 tests pass, {ESCAPES}",
        session=RecordedSession.of(record),
    )
    with RolloutLog(directory.database) as log:
        log.append(rollout)
    directory.workdir(0).mkdir()
    (directory.workdir(0) / "agent.log").write_text(f"began\nValueError: no {ESCAPES}\n\n")
    digests = {"scripted": {"tokenizer_digest": Tokenizer.load(tmp_path / "toy").digest}}
    lock = note_engine(note_start({"digests": digests}), "scripted", ["scripted"], tmp_path / "toy")
    directory.write_json(directory.lock, lock)
    directory.write_json(directory.result, {"status": "passed", "exit_code": 0})
    return directory


def test_a_run_says_how_each_session_ended_and_why(run: RunDirectory, capsys: pytest.CaptureFixture[str]):
    """The last line of a crashed agent, where its log is, and where every token went."""
    show(run.path)
    overview = capsys.readouterr().out
    show(run.path, "0")
    session = capsys.readouterr().out

    assert "crashed" in overview
    assert "ValueError: no" in overview
    assert f"{run.workdir(0) / 'agent.log'}" in session
    assert "crashed, by the agent" in session
    assert "1 x ValueError: no" in overview
    for words in ("reward         0.000", "3 of 7 tests pass", "tests 3", '{"answer":', "it said last   began"):
        assert words in session
    assert "difference 0" in session


@pytest.mark.parametrize("left", ["link", "pipe", "folder"])
def test_what_an_agent_puts_in_the_place_of_its_log_is_not_shown(run: RunDirectory, left: str, tmp_path: Path):
    """A link leads to what the agent may not read, and nobody writes into a pipe."""
    log = run.workdir(0) / "agent.log"
    log.unlink()
    if left == "link":
        (tmp_path / "secret").write_text("hf_secret")
        log.symlink_to(tmp_path / "secret")
    elif left == "pipe":
        os.mkfifo(log)
    else:
        log.mkdir()

    [line] = look_at(run.path).sessions

    assert (line.agent_log, line.outcome) == (None, OutcomeKind.CRASHED)
    assert "hf_secret" not in str(line)


def test_branches_are_a_tree(run: RunDirectory, capsys: pytest.CaptureFixture[str]):
    """Both ways on from the first turn stand below it."""
    session_id = look_at(run.path).find("0").session_id
    assert session_id is not None
    walked = [(turn.index, depth) for turn, depth in look_into(run.path, session_id).walk()]
    show(run.path, "0")

    assert walked == [(0, 0), (1, 1), (2, 1)]
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines() if line.startswith("+ ")] == [
        ["+", "1"],
        ["+", "2"],
    ]


@pytest.mark.parametrize("arguments", [{}, {"session": "0"}, {"session": "0", "tokens": True}])
def test_nothing_hostile_reaches_the_terminal(
    run: RunDirectory, arguments: dict[str, Any], capsys: pytest.CaptureFixture[str]
):
    """Escape sequences, control characters and marks of direction are written out, wherever they came from."""
    show(run.path, **arguments)

    out = capsys.readouterr().out
    assert [char for char in out if not char.isprintable() and char != "\n"] == []
    assert "\\x1b" in out


def test_the_text_of_the_tokens_is_what_was_said(run: RunDirectory, capsys: pytest.CaptureFixture[str]):
    """Token by token, with logprob, version and what becomes of it."""
    show(run.path, "0", turn=1, tokens=True, as_json=True)
    document = json.loads(capsys.readouterr().out)

    tokens = document["tokens"]["1"]
    assert "".join(token["text"] for token in tokens) == f"{WORDS}<|im_end|>"
    assert {token["version"] for token in tokens} == {"0"}
    assert all(token["logprob"] <= 0 for token in tokens)
    assert {token["fate"] for token in tokens} == {"trained"}
    assert document["session"]["ledger"]["dropped"] == {}


DAMAGES: dict[str, Callable[[RunDirectory], object]] = {
    "config.toml": lambda run: run.config.unlink(),
    "lock.json": lambda run: run.lock.unlink(),
    "run.db": lambda run: run.database.unlink(),
    "result.json": lambda run: run.result.unlink(),
    "lock.json:": lambda run: run.lock.write_text("{"),
    "Expected `array`": lambda run: run.lock.write_text('{"starts": 7}'),
    "Expected `object`": lambda run: run.lock.write_text("[]"),
    "what it ran with: it is damaged (RecursionError": lambda run: run.lock.write_text("[" * 200_000),
    "its configuration: it is damaged (RecursionError": lambda run: run.config.write_text(f"x = {'[' * 100_000}"),
    "its report: it is damaged (RecursionError": lambda run: run.result.write_text("[" * 200_000),
    "its tokenizer: ": lambda run: run.lock.write_text(json.dumps({"tokenizers": {"x": "y" * 5_000}})),
    "run.db:": lambda run: run.database.write_bytes(b"SQLite format 3\0" + b"x" * 4096),
    "toy is not on this machine": lambda run: (run.path.parent / "toy" / "tokenizer.json").unlink(),
    "has changed": lambda run: _change(run.path.parent / "toy" / "tokenizer.json"),
}


def _change(tokenizer: Path) -> None:
    tokenizer.write_text(tokenizer.read_text().replace("{", "{ ", 1))


@pytest.mark.parametrize("what", DAMAGES)
def test_what_is_missing_is_said_and_the_rest_is_shown(
    run: RunDirectory, what: str, capsys: pytest.CaptureFixture[str]
):
    """A run that was killed, is of another machine, or has lost a file."""
    DAMAGES[what](run)

    show(run.path)
    out = capsys.readouterr().out
    assert any(what in line for line in out.splitlines() if line.startswith("missing: ")), out
    assert what.startswith("run.db") or "crashed" in out


@pytest.mark.parametrize("at", ["1e20", "-1e20", "NaN", "Infinity"])
def test_a_start_at_no_time_is_shown_as_it_is(run: RunDirectory, at: str, capsys: pytest.CaptureFixture[str]):
    """With its command, and all the rest of the run."""
    run.lock.write_text(f'{{"starts": [{{"at": {at}, "command": ["harness", "run"]}}]}}')

    show(run.path)
    [line] = [line for line in capsys.readouterr().out.splitlines() if "harness run" in line]
    assert "which is no time" in line


def test_a_store_with_a_session_that_cannot_be_read_shows_the_line_of_it(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
):
    """How it ended stands in the run, and that its turns are damaged below."""
    for messages in ("[5]", "[" * 5_000 + "]" * 5_000):
        with closing(sqlite3.connect(run.database)) as connection:
            connection.execute("UPDATE turns SET messages_delta = ? WHERE turn = 1", (messages,))
            connection.commit()
        show(run.path, "0")
        out = capsys.readouterr().out
        assert "crashed, by the agent" in out
        assert "missing: its turns: " in out
        show(run.path, "0", tokens=True, as_json=True)
        document = json.loads(capsys.readouterr().out)
        assert document["session"] is None
        assert document["missing"]


DAMAGED_TURNS: list[tuple[str, Json]] = [
    ("the words of turn 1", {"messages_delta": [5]}),
    ("the words of turn 1", {"reply": {"tool_calls": 5}}),
    ("the words of turn 1", {"reply": {"tool_calls": ["x"]}}),
    ("the tokens of turn 1", {"weight_versions": [{"version": "0"}], "output_ids": [1], "logprobs": [0.0]}),
    ("its turns", {"discarded": [7]}),
    ("its turns", {"weight_versions": [7], "output_ids": []}),
]


@pytest.mark.parametrize(("what", "damage"), DAMAGED_TURNS)
@pytest.mark.parametrize("as_json", [False, True])
def test_a_damaged_turn_of_another_server_is_said(
    run: RunDirectory, what: str, damage: Json, as_json: bool, capsys: pytest.CaptureFixture[str]
):
    """Its record came over the network, and nobody has looked at what is in it; the other parts are shown."""
    session_id = look_at(run.path).find("0").session_id
    assert session_id is not None
    record = session_record(read_session(run.database, session_id))
    record["turns"][1].update(damage)
    with AttachedSessions(run.database) as attached:
        attached.keep(session_id, {**record, "turns": []})
    with closing(sqlite3.connect(run.database)) as connection:
        connection.execute("UPDATE attached_sessions SET record = ?", (json.dumps(record),))
        connection.commit()

    show(run.path, "0", tokens=True, as_json=as_json)
    out = capsys.readouterr().out
    assert "crashed" in out
    if as_json:
        json.loads(out)
    else:
        assert any(line.startswith(f"missing: {what}: ") for line in out.splitlines()), out


def test_without_a_tokenizer_tokens_have_no_text(run: RunDirectory, capsys: pytest.CaptureFixture[str]):
    """Ids, logprobs and versions are there all the same; one that is named is used."""
    toy = run.path.parent / "toy"
    toy.rename(run.path.parent / "elsewhere")
    show(run.path, "0", turn=0, tokens=True, as_json=True)
    bare = json.loads(capsys.readouterr().out)
    show(run.path, "0", turn=0, tokens=True, tokenizer=run.path.parent / "elsewhere", as_json=True)
    named = json.loads(capsys.readouterr().out)

    assert {token["text"] for token in bare["tokens"]["0"]} == {None}
    assert "".join(token["text"] for token in named["tokens"]["0"]) == "One.<|im_end|>"


async def test_a_store_in_use_is_read_and_left_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Its server continues, and its sessions are listed and shown."""
    path = tmp_path / "sessions.db"
    async with serving(*says("One.", "Two.", "Three."), store=path) as client:
        record = await converse(client)
        before = path.read_bytes()
        show(path)
        listed = capsys.readouterr().out
        show(path, record["session_id"][:6])
        shown = capsys.readouterr().out
        assert path.read_bytes() == before
        assert await converse(client)

    assert record["session_id"][:8] in listed
    assert "Or else?" in shown


async def test_a_server_that_runs_is_looked_at_over_http(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Its sessions, and one of them with its tokens; what it does not know is said."""
    write_scenario(tmp_path / "small")  # and the tokenizer of the server
    settings = ServerSettings(admin_token="t0ken")
    async with serving(*says("One.", WORDS, "Three."), settings=settings) as client:
        session_id = (await converse(client))["session_id"]
        at_server = partial(asyncio.to_thread, show, server=client.url, admin_token="t0ken")

        await at_server()
        listed = capsys.readouterr().out
        await at_server(Path(session_id[:6]), turn=1)
        shown = capsys.readouterr().out
        await at_server(Path(session_id[:6]), turn=1, tokens=True, tokenizer=tmp_path / "toy", as_json=True)
        tokens = json.loads(capsys.readouterr().out)["tokens"]["1"]
        with pytest.raises(RunError, match=f"no session 'x'.*harness show --server {client.url}"):
            await at_server(Path("x"))
        with pytest.raises(SessionServerError):
            await asyncio.to_thread(show, server=client.url)

    assert re.search(rf"^ *{session_id[:8]} +tool ", listed, re.MULTILINE)
    assert f"one session: harness show --server {client.url} {session_id[:8]}" in listed
    assert "difference 0" in shown
    assert "\\x1b" in shown
    assert "".join(token["text"] for token in tokens) == f"{WORDS}<|im_end|>"


async def test_where_the_tokens_of_each_turn_went_is_the_ledger_of_the_session(tmp_path: Path):
    """Turn by turn, of aborted, forked and forgotten ones; a record by another version makes nothing up."""
    steps = [ScriptStep(text="One."), ScriptStep(text="Two."), ScriptStep(text="Three.")]
    async with serving(*steps, store=tmp_path / "s.db") as client:
        record = await converse(client)
    view = look_into(tmp_path / "s.db", record["session_id"])

    counts: dict[str, int] = {}
    for turn in view.turns:
        for fate, count in turn.fates.items():
            counts[fate] = counts.get(fate, 0) + count
    ledger = view.ledger
    assert counts == {"trained": ledger["trained"], **ledger["dropped"]}
    assert sum(counts.values()) == ledger["generated"]


def test_a_conversation_of_any_length_is_walked():
    from harness.viewer.session_view import SessionView

    turn: Json = {"status": "completed", "reply": assistant("x")}
    record = {
        "session_id": "a",
        "phase": "open",
        "turns": [{**turn, "turn": n, "parent": n - 1 if n else None} for n in range(5_000)],
    }
    assert {depth for _, depth in SessionView.of(record).walk()} == {0}


def test_what_cannot_be_found_is_said_with_a_next_step(run: RunDirectory, tmp_path: Path):
    """A path, a session, a turn, and an option without its session."""
    with pytest.raises(RunError, match="found nothing at"):
        show(tmp_path / "nowhere")
    with pytest.raises(RunError, match="is not a run directory"):
        show(tmp_path)
    with pytest.raises(RunError, match="no session '7'"):
        show(run.path, "7")
    with pytest.raises(RunError, match="has no turn 9"):
        show(run.path, "0", turn=9)
    with pytest.raises(RunError, match="expected a run directory"):
        show()
    with pytest.raises(RunError, match="expected one session behind --server"):
        show(run.path, "7", server="http://127.0.0.1:1")
    with pytest.raises(RunError, match="expected a session with --turn"):
        show(run.path, turn=1)


COMMAND = ["/bin/harness", "run", "x", "--tokenizer", "toy", "--max-tokens=8", "--model", "m"]
SECRETS = [
    ["--admin-token", "s3cret"],
    ["--admin-token=s3cret"],
    ["--engine-key", "s3cret"],
    ["--ENGINE_KEY=s3cret\ns3cret"],
    ["--server", "http://op:s3cret@host:1/"],
    ["--engine=sglang=http://u:s3cret@a,http://u:s3cret@b"],
    ["--server", "http://host/?api_key=s3cret"],
    ["OPENAI_API_KEY=s3cret"],
    ["--env=DB_PASSWORD=s3cret=s3cret"],
]


@pytest.mark.parametrize("words", SECRETS, ids=str)
def test_a_run_notes_the_command_without_its_secrets(monkeypatch: pytest.MonkeyPatch, words: list[str]):
    """Each time that it is begun or taken up; all other words stand as they were."""
    monkeypatch.setattr("sys.argv", [*COMMAND, *words, "--seed", "7"])
    commands = [start["command"] for start in note_start(note_start({"digests": {}}))["starts"]]

    assert "s3cret" not in str(commands)
    assert [(each[: len(COMMAND)], each[-2:]) for each in commands] == [(COMMAND, ["--seed", "7"])] * 2


@pytest.mark.parametrize("argv", [["/x/train.py", "--wandb", "s3cret"], ["-c", "s3cret"], []], ids=str)
def test_of_another_program_a_run_notes_the_name_alone(monkeypatch: pytest.MonkeyPatch, argv: list[str]):
    monkeypatch.setattr("sys.argv", argv)

    assert [start["command"] for start in note_start({})["starts"]] == [[Path(each).name for each in argv[:1]] or [""]]


async def test_what_happened_to_all_sessions_at_once_is_on_record(run: RunDirectory):
    """Pauses, updates and drains by the store, faults by their log; each with its time and who it was."""
    began = time.time()
    async with serving(store=run.database) as client:
        for verb in ("pause", "resume", "drain", "resume"):
            assert (await client.http.post(f"/sessions/{verb}")).status_code == 200
        update = {"holder": "trainer", "engines": True}
        assert (await client.http.post("/sessions/pause", json=update)).status_code == 200
        released = {"holder": "trainer", "engines_continued": True}
        assert (await client.http.post("/sessions/resume", json=released)).status_code == 200
    fault = {"scenario": "small", "fault": 0, "action": "kill_agent", "trigger": "at 1 s", "at_s": 1.0}
    lines = [fault, {**fault, "at": began - 1.0, "did": "killed 1 agent"}]
    run.faults.write_text("".join(json.dumps(line) + "\n" for line in lines))
    bands = look_at(run.path).bands

    assert [(band.kind, band.words) for band in bands] == [
        ("fault", "kill_agent, killed 1 agent"),
        ("pause", "by anonymous"),
        ("drain", "by anonymous"),
        ("update", "by trainer"),
    ]
    times = [at for band in bands[1:] for at in (band.begin, band.end)]
    assert times == sorted(times, key=float)
    assert began - 0.002 <= times[0]
    assert list(look_at(run.database).bands) == bands[1:]


@pytest.mark.parametrize("value", ["9e999", "'soon'", "x'00'"])
async def test_a_hold_at_no_time_is_said(run: RunDirectory, value: str):
    async with serving(store=run.database) as client:
        await client.http.post("/sessions/pause")
    with closing(sqlite3.connect(run.database)) as connection:
        connection.execute(f"UPDATE hold_times SET began_at = {value}")
        connection.commit()

    for path in (run.path, run.database):
        view = look_at(path)
        assert len(view.sessions) == 1
        assert [band.kind for band in view.bands] == []
        assert any(sentence.startswith("its pauses: it is damaged") for sentence in view.missing)
