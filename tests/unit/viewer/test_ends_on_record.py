"""How a session ended and which tokenizer reads it, without an option: of a store, of a server, of a run."""

import asyncio
import json
import sqlite3
from contextlib import closing
from functools import partial
from pathlib import Path

import httpx
import pytest

from harness.cli.look.show import show, view
from harness.cli.options import find_tokenizer
from harness.engines.scripted import ScriptStep
from harness.errors import TokenizerError
from harness.lab.models.tokenizer_files import write_small_tokenizer
from harness.rollouts.agents.task import AgentTask, FunctionAgent, ProgramAgent
from harness.rollouts.manager import SessionManager
from harness.server.settings import ServerSettings
from harness.tokens.tokenizer import Tokenizer
from harness.types import Json
from harness.viewer.look import look_at
from tests.builders import toy_tokenizer, user
from tests.session_servers.served import SetClock, eventually, says, serving, session_on

DUMP = Path(__file__).parents[1] / "store" / "store_of_version_6.sql"


async def _ask(base_url: str, api_key: str, **_: object) -> Json:
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {api_key}"}, timeout=30) as client:
        await client.post(f"{base_url}/chat/completions", json={"model": "m", "messages": [user("Hi.")]})
    return {"reward": 0.25}


async def _fail(**_: object) -> Json:
    raise ValueError("no more eggs")


async def test_a_store_says_how_rollouts_ended_and_reads_their_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Outcome, reason and reward; a program's own word for its reward is not taken."""
    store = tmp_path / "s.db"
    lying = ("sh", "-c", 'echo \'{"reward": 7}\' > "$HARNESS_RESULT_FILE"')
    async with serving(*says("Good morning."), store=store) as client, SessionManager(client.url) as manager:
        agents = [FunctionAgent("ask", _ask), FunctionAgent("fail", _fail), ProgramAgent("lie", lying)]
        for number, agent in enumerate(agents):
            await manager.run(AgentTask(agent, "Go.", tmp_path / str(number), "m"))
        asked = {line.detail: line for line in look_at(store).sessions}
    show(store)
    listed = capsys.readouterr().out
    [first] = [line for line in asked.values() if line.reward is not None]
    show(store, first.session_id, tokens=True)
    shown = capsys.readouterr().out
    view(store, out=tmp_path / "page.html")

    assert "no outcome" not in listed
    assert "missing" not in listed + shown
    assert "no more eggs" in listed
    assert (first.outcome, first.reward, first.sampled) == ("finished", 0.25, 14)
    assert [line.reward for line in asked.values() if line is not first] == [None, None]
    assert '"G"' in shown
    assert '"missing":[]' in (tmp_path / "page.html").read_text()
    with closing(sqlite3.connect(store)) as connection:
        found = connection.execute("SELECT DISTINCT tokenizer, tokenizer_digest FROM sessions").fetchall()
    assert found == [(str(toy_tokenizer().folder), toy_tokenizer().digest)]


async def test_a_store_says_why_sessions_without_a_rollout_are_closed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Deleted, unused, taken over; and one that is not closed."""
    store, clock = tmp_path / "s.db", SetClock()
    async with serving(store=store, clock=clock, settings=ServerSettings(idle_ttl_s=60.0)) as client:
        await client.create()
        clock.now += 100
        await client.server.sessions.expire()
        deleted = await client.create()
        await client.http.delete(f"/sessions/{deleted.session_id}")
        ended = await client.create()
        await client.http.post(f"/sessions/{ended.session_id}/end", json={})
        await client.create(resumes=ended.session_id)
    show(store)

    listed = capsys.readouterr().out
    for word in ("idle", "deleted", "taken_over", "another session continued its turns", "open", "it is not closed"):
        assert word in listed
    assert "no outcome" not in listed


@pytest.mark.parametrize("query", ["outcome=x&reward=nan", "outcome=x&reward=1_0", f"outcome={'x' * 41}"])
async def test_an_end_that_cannot_be_meant_is_refused(query: str):
    """By the name of its parameter; the session stays."""
    async with session_on() as (client, session):
        refused = await client.http.delete(f"/sessions/{session.session_id}?{query}")
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] in query
        assert (await client.record(session))["phase"] == "open"


async def test_a_server_names_the_tokenizer_of_its_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """`show --server` and the page read them without an option."""
    settings = ServerSettings(admin_token="t0ken")
    async with session_on(*says("Good morning."), settings=settings) as (client, session):
        await client.say(session, [user("Hi.")])
        at_server = {"server": client.url, "admin_token": "t0ken"}
        await asyncio.to_thread(partial(show, Path(session.session_id), tokens=True, **at_server))  # type: ignore[arg-type]
        await asyncio.to_thread(partial(view, out=tmp_path / "page.html", **at_server))  # type: ignore[arg-type]

    shown = capsys.readouterr().out
    assert '"G"' in shown
    assert "missing" not in shown
    assert '"missing":[]' in (tmp_path / "page.html").read_text()


async def test_another_tokenizer_is_told_and_ids_that_it_lacks_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """In the table, in the document and in the page; a folder without a tokenizer is refused."""
    large = write_small_tokenizer(tmp_path / "large", ("Good morning",))
    small = write_small_tokenizer(tmp_path / "small")
    store = tmp_path / "s.db"
    async with session_on(*says("Good morning."), store=store) as (client, session):
        await client.say(session, [user("Hi.")])
    top = next(token_id for token_id in range(400) if Tokenizer.load(large).decode([token_id]) == "Good morning")
    with closing(sqlite3.connect(store)) as connection:
        connection.execute("UPDATE turns SET output_ids = ?", (top.to_bytes(4, "little") + bytes([5, 0, 0, 0]) * 13,))
        connection.commit()
    name = session.session_id
    show(store, name, tokens=True, tokenizer=small)
    table = capsys.readouterr().out
    show(store, name, tokens=True, tokenizer=large, as_json=True)
    document = json.loads(capsys.readouterr().out)
    show(store, name, tokens=True, tokenizer=small, as_json=True)
    lacking = json.loads(capsys.readouterr().out)
    view(store, out=tmp_path / "page.html", tokenizer=small)

    assert f"id {top} is not in this tokenizer" in table
    assert any(each.startswith("its tokenizer: that in") for each in document["missing"])
    assert document["tokens"]["0"][0]["text"] == "Good morning"
    assert lacking["tokens"]["0"][0]["text"] is None
    assert any(f"id {top} is not in this tokenizer" in each for each in lacking["missing"])
    assert f"the text of id {top}" in (tmp_path / "page.html").read_text()
    with pytest.raises(TokenizerError, match="expected a HuggingFace folder"):
        show(store, name, tokens=True, tokenizer=tmp_path)


async def test_a_turn_that_was_cut_shows_what_it_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """As far as it had come when the server was told to end."""
    store, slow = tmp_path / "s.db", ScriptStep(text="Once upon a time there was a fox.", token_delay_s=0.02)
    async with session_on(slow, store=store, settings=ServerSettings(stop_grace_s=0.0)) as (client, session):
        asking = asyncio.create_task(client.chat(session, [user("Tell.")]))
        await eventually(lambda: any(live.sampled > 5 for live in client.engine.live))
        asking.cancel()
    show(store, session.session_id)

    [line] = [each for each in capsys.readouterr().out.splitlines() if each.strip().startswith("assistant")]
    assert "Once " in line
    assert line.endswith("[cut]")


def test_a_store_of_before_says_what_it_knows(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    store = tmp_path / "old.db"
    with closing(sqlite3.connect(store)) as connection:
        connection.executescript(DUMP.read_text(encoding="utf-8"))
    show(store)

    listed = capsys.readouterr().out
    assert "no outcome" not in listed
    assert "its tokenizer: not recorded; name it with --tokenizer" in listed


def test_a_tokenizer_is_named_as_a_model_is(tmp_path: Path):
    """By its name in the catalogue, which fetches it; everything else is a folder."""
    assert find_tokenizer(str(tmp_path)) == tmp_path
    assert (find_tokenizer("tiny-random-qwen3") / "tokenizer.json").is_file()
