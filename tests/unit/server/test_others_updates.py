"""Weights that somebody else changes, straight at the engine: what the server learns of it, and what it does then."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from harness.engines.scripted import ScriptStep, scripted_logprobs
from harness.server.serving import serve
from harness.server.settings import ServerSettings
from harness.server.store.base import MemoryStore
from harness.types import Json, as_ids
from tests.builders import toy_template, user
from tests.fake_engines.fake_server import FakeServer
from tests.fake_engines.fake_server import serving as serving_fake
from tests.fake_engines.providers import fake_provider, make_fake, scripted_engine
from tests.session_servers.served import PATIENCE_S, Client, eventually

KINDS = ("sglang", "vllm")
TALK = ScriptStep(text="one two three four five six seven eight nine ten", token_delay_s=0.01)
VERBS: dict[str, dict[str, tuple[str, Json]]] = {
    "sglang": {
        "pause": ("/pause_generation", {"mode": "abort"}),
        "label": ("/update_weight_version", {"abort_all_requests": False}),
        "continue": ("/continue_generation", {}),
    },
    "vllm": {
        "pause": ("/pause?mode=abort&clear_cache=true", {}),
        "label": ("/update_weight_version", {}),
        "continue": ("/resume", {}),
    },
}


@dataclass
class Trainer:
    """Somebody who knows the engine only, in front of which a session server stands that it does not know of."""

    kind: str
    fake: FakeServer
    client: Client
    http: httpx.AsyncClient
    before: int
    """Requests that were served before the first turn."""

    async def tell(self, verb: str, **fields: Any) -> None:
        """Have the engine obey."""
        path, body = VERBS[self.kind][verb]
        (await self.http.post(path, json=body | fields)).raise_for_status()

    async def update(self, version: int | str) -> None:
        """Pause, label, continue: what an update looks like from outside."""
        await self.tell("pause")
        await self.tell("label", new_version=str(version))
        await self.tell("continue")

    async def noticed(self) -> None:
        """Return once the server has asked whether the engine is paused."""
        asked = self.times_asked()
        await eventually(lambda: self.times_asked() > asked)

    def times_asked(self) -> int:
        """How often somebody has asked whether the engine is paused."""
        return self.fake.paths.count("/ready") + self.fake.paths.count("/is_paused")

    async def once(self, holds: Callable[[], bool]) -> None:
        """Return once `holds()`."""
        await eventually(holds)

    async def sampling(self, nth: int = 0) -> None:
        """Return once the `nth` request has some tokens and wants more."""
        await eventually(lambda: len(self.fake.sampled) == self.before + nth)
        await eventually(lambda: any(live.sampled > 2 for live in self.fake.engine.live))

    async def one_more(self) -> None:
        """Return once the request under way has another token."""
        [live] = self.fake.engine.live
        await eventually(lambda: any(each.sampled > live.sampled for each in self.fake.engine.live))


@asynccontextmanager
async def trained(kind: str, *steps: ScriptStep, **settings: Any) -> AsyncIterator[Trainer]:
    """A session server in front of one engine server."""
    fake = make_fake(kind, scripted_engine(*(steps or (ScriptStep(text="Understood."),))))
    async with (
        serving_fake(fake, notices_disconnects=kind == "vllm"),
        serve(fake_provider(fake), toy_template(), MemoryStore(), ServerSettings(**settings)) as running,
        httpx.AsyncClient(base_url=running.url, timeout=PATIENCE_S) as agents,
        httpx.AsyncClient(base_url=fake.url, timeout=PATIENCE_S) as http,
    ):
        client = Client(agents, fake.engine, running.server, running.url, running.restored)
        yield Trainer(kind, fake, client, http, len(fake.sampled))


def columns(sample: Json, *names: str) -> list[tuple[Any, ...]]:
    """The columns `names` of the sampled tokens."""
    rows = zip(sample["behavior_versions"], *(sample[name] for name in names), strict=True)
    return [row[1:] for row in rows if row[0] >= 0]


def truth(sample: Json) -> list[float]:
    """The logprob of every sampled token under its proximal version."""
    start = len(sample["tokens"]) - sample["response_length"]
    rows = enumerate(zip(sample["behavior_versions"], sample["proximal_versions"], strict=True), start)
    ids = as_ids(sample["tokens"])
    return [float(scripted_logprobs(ids[at : at + 1], at, str(p))[0]) for at, (b, p) in rows if b >= 0]


@pytest.mark.parametrize("polls", [False, True], ids=["nobody polls", "somebody polls"])
@pytest.mark.parametrize("kind", KINDS)
async def test_polling_health_changes_nothing_in_the_data(kind: str, polls: bool):
    """The staleness cap, the proximal values and the newest version are those of the engine's own word."""
    async with trained(kind) as trainer:
        session = await trainer.client.create(limits={"staleness": 1})
        history, statuses = [user("a")], []
        for version in range(4):
            await trainer.tell("label", new_version=str(version))
            if polls:
                await trainer.client.http.get("/health")
            answer = await trainer.client.chat(session, history)
            statuses.append(answer.status_code)
            if answer.status_code == 200:
                history += [answer.json()["choices"][0]["message"], user("continue")]
        [sample] = await trainer.client.samples(session)

        assert statuses == [200, 200, 404, 404]
        assert set(sample["behavior_versions"]) == {-1, 0, 1}
        assert sample["metadata"]["staleness"]["newest_version"] == 3
        assert [p for (b, p) in columns(sample, "behavior_versions", "proximal_versions") if b == 0] == [1] * 12


@pytest.mark.parametrize("kind", KINDS)
async def test_updates_behind_our_back_never_end_a_turn(kind: str):
    """Five of them, each with a pause that cuts the turn short; every token that met its next version was scored."""
    async with trained(kind, TALK) as trainer:
        session = await trainer.client.create()
        asking = asyncio.create_task(trainer.client.chat(session, [user("a")]))
        for version in range(1, 6):
            await trainer.sampling(version - 1)
            await trainer.update(version)
        answer = await asking
        [sample] = await trainer.client.samples(session)

        assert answer.status_code == 200, answer.text
        assert set(sample["behavior_versions"]) == set(range(6))
        assert sample["weight_versions"] == [str(version) for version in range(6)]
        assert columns(sample, "proximal_logprobs") == [(value,) for value in truth(sample)]
        met = [p == b + 1 for b, p in columns(sample, "behavior_versions", "proximal_versions") if b < 5]
        assert all(met)


@pytest.mark.parametrize("kind", KINDS)
async def test_pauses_behind_our_back_never_end_a_turn(kind: str):
    """More of them than aborts that nobody asked for would be allowed."""
    async with trained(kind, TALK, max_unsolicited_aborts=1) as trainer:
        session = await trainer.client.create()
        asking = asyncio.create_task(trainer.client.chat(session, [user("a")]))
        for nth in range(4):
            await trainer.sampling(nth)
            await trainer.tell("pause")
            await trainer.noticed()
            await trainer.tell("continue")

        assert (await asking).status_code == 200


@pytest.mark.parametrize("kind", KINDS)
async def test_aborts_that_new_weights_explain_later_never_end_a_turn(kind: str):
    """Five of them, each before the label it was for: only the tokens of the next request say what has happened."""
    async with trained(kind, replace(TALK, text=2 * TALK.text), max_unsolicited_aborts=1) as trainer:

        async def cut_short_and_label() -> None:
            for version in range(1, 6):
                await trainer.sampling(version - 1)
                await trainer.fake.engine.abort(None)
                await trainer.sampling(version)
                trainer.fake.engine.relabel(str(version))
                await trainer.one_more()

        session = await trainer.client.create()
        meddling = asyncio.create_task(cut_short_and_label())
        answer = await trainer.client.chat(session, [user("a")])
        meddling.cancel()
        await asyncio.wait({meddling})
        [sample] = await trainer.client.samples(session)

        assert answer.status_code == 200, answer.text
        assert set(sample["behavior_versions"]) == set(range(6))


@pytest.mark.parametrize("kind", KINDS)
async def test_a_turn_that_is_cut_short_ends_when_its_tokens_are_too_old(kind: str):
    """The cap is asked before each further request of a turn; what was sampled is a sample."""
    async with trained(kind, TALK) as trainer:
        session = await trainer.client.create(limits={"staleness": 1})
        asking = asyncio.create_task(trainer.client.chat(session, [user("a")]))
        for version in (1, 2):
            await trainer.sampling(version - 1)
            await trainer.update(version)
        answer = await asking
        [sample] = await trainer.client.samples(session)

        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "limit_reached")
        assert sample["status"] == "aborted"
        assert set(sample["behavior_versions"]) == {0, 1}


@pytest.mark.parametrize("is_drained", [False, True], ids=["retry", "takeover"])
@pytest.mark.parametrize("kind", KINDS)
async def test_a_turn_that_broke_off_does_not_go_on_when_it_is_too_old(kind: str, is_drained: bool):
    """Its client, or the session that takes over, comes back after more updates than the cap allows."""
    async with trained(kind, TALK) as trainer:
        session = await trainer.client.create(limits={"staleness": 1})
        asking = asyncio.create_task(trainer.client.chat(session, [user("a")]))
        await trainer.sampling()
        if is_drained:
            await trainer.client.http.post("/sessions/drain")
            await trainer.fake.engine.abort(None)
            await asking
            await trainer.client.http.post("/sessions/resume")
        else:
            asking.cancel()
            await trainer.once(lambda: not trainer.fake.engine.live)
        await trainer.tell("label", new_version="5")
        if is_drained:
            session = await trainer.client.create(limits={"staleness": 1}, resumes=session.session_id)

        answer = await trainer.client.chat(session, [user("a")])

        samples = await trainer.client.samples(session)
        if is_drained:
            assert answer.status_code == 200
            assert [set(sample["behavior_versions"]) for sample in samples] == [{5}]
        else:
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "limit_reached")
            assert [(set(sample["behavior_versions"]), sample["status"]) for sample in samples] == [({0}, "aborted")]
