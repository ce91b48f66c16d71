"""A further kind of engine is two modules and a row: here `toy_server`, `toy_provider`, and the row below."""

from collections.abc import AsyncIterator

import httpx
import pytest
import pytest_asyncio

from harness.engines.connect import open_engine
from harness.engines.kinds import ENGINE_KINDS, ControlVerb, EngineKind, PauseQuestion, ServerKind
from harness.errors import ScenarioError
from harness.lab.lanes import LaneEngine
from harness.rollouts.control.engines import EngineServer, as_workers
from harness.server.serving import serve
from harness.server.store.base import MemoryStore
from tests.builders import EOS, toy_template, toy_tokenizer, user
from tests.session_servers.served import PATIENCE_S, Client
from tests.unit.engines.toy_provider import ToyProvider
from tests.unit.engines.toy_server import toy_server

ROW = EngineKind(
    "toy",
    server=ServerKind(
        title="Toy",
        open=ToyProvider,
        abort_all=ControlVerb("/quiet", {}),
        resume=ControlVerb("/go_on", {}),
        paused=PauseQuestion("/asleep", lambda status, _: True if status == 200 else None),
    ),
)


@pytest_asyncio.fixture(name="toy")
async def _toy(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[str, list[str]]]:
    """The address of a toy server, a kind like any other, and what it has been asked."""
    monkeypatch.setitem(ENGINE_KINDS, "toy", ROW)
    async with toy_server([*toy_tokenizer().encode_plain("four"), EOS]) as served:
        yield served


async def test_turns_of_a_session_are_served_by_the_toy(toy: tuple[str, list[str]]):
    """Opened by its name, asked over HTTP; its tokens are in the record and in the samples, exactly."""
    url, had = toy
    engine = open_engine(f"toy={url}", tokenizer=toy_tokenizer())
    async with (
        serve(engine, toy_template(), MemoryStore()) as running,
        httpx.AsyncClient(base_url=running.url, timeout=PATIENCE_S) as http,
    ):
        client = Client(http, engine, running.server, running.url, running.restored)
        session = await client.create()
        first = await client.say(session, [user("2+2?")])
        await client.say(session, [user("2+2?"), first, user("And again?")])
        record = await client.record(session)
        [sample] = await client.samples(session)

    assert first["content"] == "four"
    assert had == ["POST /say"] * 2
    assert [turn["parent"] for turn in record["turns"]] == [None, 0]
    assert sum(sample["loss_mask"]) == 2 * (len(toy_tokenizer().encode_plain("four")) + 1)


async def test_an_abort_controls_it_by_its_row(toy: tuple[str, list[str]]):
    """With its kind stated or not: every kind of the table is tried."""
    url, had = toy
    for name in (f"toy={url}", url):
        [worker] = as_workers([name])
        assert isinstance(worker, EngineServer)
        await worker.abort_all(deadline_s=PATIENCE_S)
        assert not await worker.is_paused(deadline_s=PATIENCE_S)

    assert had == ["POST /quiet"] * 2


def test_without_its_row_it_is_no_engine():
    with pytest.raises(ScenarioError, match=r"expected one of local, scripted, sglang=URL\[,URL\], vllm=URL"):
        open_engine("toy=http://127.0.0.1:1", tokenizer=toy_tokenizer())
    with pytest.raises(ScenarioError, match="expected sglang, vllm or None, got 'toy'"):
        EngineServer("http://127.0.0.1:1", "toy")


def test_lanes_start_engines_of_the_table():
    """The one table beside it has the same names."""
    assert {engine.value for engine in LaneEngine} <= set(ENGINE_KINDS)
