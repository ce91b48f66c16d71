"""The page of a run: read back by an HTML parser and a decoder of the test's own. A browser reads it next door."""

import asyncio
import base64
import hashlib
import json
import math
import re
import struct
from functools import partial
from html.parser import HTMLParser
from pathlib import Path

import pytest

from harness.cli.look.show import view
from harness.engines.scripted import ScriptedFault, ScriptStep
from harness.errors import RunError, SessionServerError
from harness.rollouts.client.connections import SessionServerAddress
from harness.server.settings import ServerSettings
from harness.server.store.sqlite import read_session
from harness.sessions.record import session_record
from harness.tokens.tokenizer import Tokenizer
from harness.types import Json
from harness.viewer.look import look_into_all
from harness.viewer.page.run_page import Side, page_pieces, write_page
from harness.viewer.run_view import RunView, SessionLine
from harness.viewer.session_view import SessionView
from tests.browser import HOSTILE
from tests.builders import user
from tests.session_servers.served import says, session_on
from tests.toy_model import write_toy_model
from tests.viewed_run import long_turn


class Page(HTMLParser):
    """The elements of a page: data by id, scripts that run, styles, and every start tag with its attributes."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.data: dict[str, str] = {}
        self.scripts: list[str] = []
        self.styles: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        tag, attributes = self.tags[-1] if self.tags else ("", {})
        if tag == "style" and len(self.styles) == 0:
            self.styles.append(data)
        elif tag == "script" and attributes.get("type") is None and data.strip():
            self.scripts.append(data)
        elif tag == "script" and data.strip():
            self.data[str(attributes["id"])] = data

    @property
    def policy(self) -> str:
        return next(str(attrs["content"]) for tag, attrs in self.tags if tag == "meta" and "http-equiv" in attrs)


@pytest.fixture(name="store")
async def _store(tmp_path: Path) -> tuple[Path, Json]:
    """A store with a session of three turns and a fork, hostile on both sides, and its record."""
    store = tmp_path / "run.db"
    write_toy_model(tmp_path / "toy")
    async with session_on(*says("One.", HOSTILE, "Three."), store=store) as (client, session):
        first = await client.say(session, [user("Begin.")])
        await client.say(session, [user("Begin."), first, user(HOSTILE)])
        await client.say(session, [user("Begin."), first, user("Or else?")])
        record = await client.record(session)
    return store, session_record(read_session(store, record["session_id"]))


def test_every_token_can_be_read_back_from_the_page(store: tuple[Path, Json], tmp_path: Path):
    """Id, text and logprob of each, of contexts too, by a decoder that shares nothing with the page's writer."""
    path, record = store
    view(path, out=tmp_path / "run.html", tokenizer=tmp_path / "toy")
    page = Page((tmp_path / "run.html").read_text("ascii"))
    table, turns = json.loads(page.data["texts"]), json.loads(page.data["s0"])["turns"]

    assert len(record["turns"]) == 3
    for recorded in record["turns"]:
        turn = next(each for each in turns if each["index"] == recorded["turn"])
        numbers = [number for (number,) in struct.iter_unpack("<H", base64.b64decode(turn["tokens"]))]
        logprobs = [value for (value,) in struct.iter_unpack("<f", base64.b64decode(turn["logprobs"]))]
        assert [table[number][0] for number in numbers] == recorded["context_ids"] + recorded["output_ids"]
        assert turn["context"] == len(recorded["context_ids"])
        assert logprobs == recorded["logprobs"]
        text = "".join(table[number][1] for number in numbers[turn["context"] :])
        assert text == Tokenizer.load(tmp_path / "toy").decode(recorded["output_ids"])
        assert turn["versions"] == recorded["weight_versions"]


def test_the_page_loads_nothing_and_runs_its_own_script_alone(store: tuple[Path, Json], tmp_path: Path):
    """The policy names the digests of the one script and the one style; no address, no handler, no markup of others."""
    view(store[0], out=tmp_path / "run.html", tokenizer=tmp_path / "toy")
    page = Page((tmp_path / "run.html").read_text("ascii"))

    assert len(page.scripts) == 1
    for directive, text in (("script-src", page.scripts[0]), ("style-src", page.styles[0])):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{directive} 'sha256-{digest}';" in page.policy
    assert page.policy.startswith("default-src 'none';")
    assert re.search(r"unsafe|https?:|\*", page.policy) is None
    names = {name for _, attributes in page.tags for name in attributes}
    assert [name for name in names if name.startswith("on") or name in {"src", "href", "style"}] == []
    assert {attributes.get("type") for tag, attributes in page.tags if tag == "script"} == {"application/json", None}
    assert "img" not in {tag for tag, _ in page.tags}


def _long_session(length: int) -> SessionView:
    return SessionView("a" * 32, "closed", [long_turn(length)], 0, {}, {})


def test_a_long_session_takes_bytes_by_its_tokens(tmp_path: Path):
    """8 for each, whatever was sampled, and the table of texts once."""
    lines = [SessionLine("a" * 32), SessionLine("b" * 32)]
    size = write_page(tmp_path / "run.html", Side(RunView("run", lines), lambda _: _long_session(30_000), None))

    assert size < 2 * 30_000 * 8 + 30_000 * 20 + 100_000


def test_a_run_of_any_size_is_read_until_the_page_is_full():
    """Further sessions are listed; the page says how many, and where their turns are."""
    lines = [SessionLine(f"{number:032x}", number=number) for number in range(1_000)]
    read: list[str] = []

    def look_inside(session_id: str) -> SessionView:
        read.append(session_id)
        return _long_session(10_000)

    pieces = page_pieces([Side(RunView("runs/big", lines), look_inside, None)], [], room_bytes=250_000)

    run = json.loads(Page("".join(pieces)).data["run"])
    assert len(read) == 4
    assert [each["element"] for each in run["sessions"]] == [*(f"s{number}" for number in range(4)), *[None] * 996]
    assert run["missing"] == [
        "turns and logs of the last 996 sessions: the page is full, look at one with `harness show runs/big SESSION`"
    ]


async def test_a_store_that_is_being_written_has_a_page(tmp_path: Path):
    """It has what was recorded by then; a turn in flight comes with its end."""
    hangs = ScriptStep(text="Two.", fault=ScriptedFault.HANG, fault_after=1)
    write_toy_model(tmp_path / "toy")
    async with session_on(ScriptStep(text="One."), hangs, store=tmp_path / "run.db") as (client, session):
        first = await client.say(session, [user("Begin.")])
        under_way = asyncio.create_task(client.chat(session, [user("Begin."), first, user("More.")]))
        await client.sampling()
        view(tmp_path / "run.db", out=tmp_path / "run.html", tokenizer=tmp_path / "toy")
        under_way.cancel()
        await asyncio.gather(under_way, return_exceptions=True)

    page = Page((tmp_path / "run.html").read_text("ascii"))
    [line] = json.loads(page.data["run"])["sessions"]
    assert (line["outcome"], line["why"]) == ("open", "it is not closed")
    assert [turn["reply"]["content"] for turn in json.loads(page.data["s0"])["turns"]] == ["One."]


def test_a_reward_that_is_no_number_is_shown_as_what_it_is(tmp_path: Path):
    """JSON has no word for it, and a page whose data cannot be read shows nothing."""
    lines = [
        SessionLine(None, number=number, reward=reward) for number, reward in enumerate((math.nan, -math.inf, 0.5))
    ]
    view = RunView("run", lines)
    write_page(tmp_path / "run.html", Side(view, lambda session_id: SessionView.of({"session_id": session_id}), None))

    page = (tmp_path / "run.html").read_text()
    [data] = re.findall(r'<script type="application/json" id="run">(.*)</script>', page)
    read = json.loads(data, parse_constant=pytest.fail)
    assert [each["reward"] for each in read["sessions"]] == ["nan", "-inf", 0.5]


async def test_a_server_that_runs_has_a_page(tmp_path: Path):
    """Of the sessions that it has; one that is gone before it is looked into is said, and so is a server that is."""
    write_toy_model(tmp_path / "toy")
    out = tmp_path / "now.html"
    async with session_on(*says("One."), settings=ServerSettings(admin_token="t0ken")) as (client, session):
        await client.say(session, [user("Begin.")])
        at_server = partial(asyncio.to_thread, view, out=out, server=client.url, tokenizer=tmp_path / "toy")
        with pytest.raises(SessionServerError):
            await at_server()
        assert not out.exists()
        for name in ("pause", "resume"):
            await client.http.post(f"/sessions/{name}", json={"holder": "trainer"})
        await at_server(admin_token="t0ken")
        look = look_into_all(SessionServerAddress(client.url, "t0ken"))
        with pytest.raises(RunError, match="no longer has session"):
            await asyncio.to_thread(look, "f" * 32)
        assert (await asyncio.to_thread(look, session.session_id)).session_id == session.session_id
    with pytest.raises(SessionServerError) as first:
        await asyncio.to_thread(look, session.session_id)
    with pytest.raises(SessionServerError) as second:
        await asyncio.to_thread(look, session.session_id)

    page = Page(out.read_text("ascii"))
    assert json.loads(page.data["s0"])["id"] == session.session_id
    [band] = json.loads(page.data["run"])["bands"]
    assert (band["kind"], band["words"], band["begin"] <= band["end"]) == ("pause", "by trainer", True)
    assert "t0ken" not in out.read_text("ascii")
    assert second.value is first.value


def test_a_page_is_of_a_run_or_of_a_server(tmp_path: Path):
    for options in ({}, {"where": tmp_path, "server": "http://127.0.0.1:1"}):
        with pytest.raises(RunError, match="expected a run directory"):
            view(out=tmp_path / "run.html", **options)


def test_a_page_that_cannot_be_written_is_one_line(store: tuple[Path, Json], tmp_path: Path):
    """The run is looked at first: neither leaves a file behind."""
    with pytest.raises(RunError, match=r"cannot write .*nowhere/run\.html"):
        view(store[0], out=tmp_path / "nowhere" / "run.html")
    with pytest.raises(RunError, match="expected a run directory"):
        view(tmp_path / "none.db", out=tmp_path / "run.html")
    assert not (tmp_path / "run.html").exists()


def test_a_page_replaces_a_page_and_nothing_else(store: tuple[Path, Json], tmp_path: Path):
    """A store that is named twice by mistake stays what it was."""
    before = store[0].read_bytes()
    for taken in (store[0], tmp_path):
        with pytest.raises(RunError, match="found something else"):
            view(store[0], out=taken)
    for _ in range(2):
        view(store[0], out=tmp_path / "run.html")

    assert store[0].read_bytes() == before
    assert [each.name for each in tmp_path.iterdir() if each.name.startswith(".")] == []
