"""Scoring what waits for the live version before that version disappears, and what the workers serve afterwards."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from harness.engines.base import LogprobScale, check_request
from harness.engines.pool.pool import EnginePool
from harness.engines.scripted import Script, ScriptedEngine, ScriptedFault, ScriptStep, scripted_logprobs
from harness.errors import EngineRejected, StoreError
from harness.server.live_version import LiveVersion
from harness.server.store.base import MemoryStore
from harness.server.store.sqlite import SQLiteStore, open_store
from harness.server.sweep import Sweep
from harness.sessions.weights.weight_update import SweepRequest
from harness.types import GenerationRequest, SamplingParams, Turn, as_ids
from tests.builders import assistant, toy_tokenizer, user
from tests.session_servers.served import Client, Served, eventually, says, serving_with

NOWHERE = Path("/nowhere")


class Engine(ScriptedEngine):
    """Keeps what it was asked to score."""

    def __init__(self, *steps: ScriptStep) -> None:
        super().__init__(toy_tokenizer(), Script(steps or says("one", "two", "three")))
        self.scored: list[tuple[int, int]] = []
        """(start, end) of each request."""
        self.sessions: list[str | None] = []
        """Whose prefix each one begins with, as a pool needs to be told."""
        self.may_score = asyncio.Event()
        self.may_score.set()

    async def score(self, input_ids, *, start, session_id=None):
        """As the scripted engine, once it may."""
        self.scored.append((start, input_ids.size))
        self.sessions.append(session_id)
        await self.may_score.wait()
        return await super().score(input_ids, start=start)


@pytest.fixture(name="engine")
def _engine() -> Engine:
    return Engine()


@pytest.fixture(name="client")
async def _client(engine: Engine) -> AsyncIterator[Client[Engine]]:
    async with serving_with(engine) as client:
        yield client


async def two_turns(client: Client, **config) -> Served:
    """A session that sits in a tool call after its second turn."""
    session = await client.create(**config)
    first = await client.say(session, [user("a")])
    await client.say(session, [user("a"), first, user("b")])
    return session


async def sweep(client: Client, version: int, **fields):
    """The report of a sweep."""
    answer = await client.http.post("/sessions/sweep", json={"version": version, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def scored_share(sample) -> float:
    """The share of sampled tokens with a true proximal value, each of which is checked."""
    behavior, proximal = as_ids(sample["behavior_versions"]), as_ids(sample["proximal_versions"])
    tokens, start = as_ids(sample["tokens"]), len(sample["tokens"]) - sample["response_length"]
    for version in set(proximal[behavior >= 0].tolist()):
        true = scripted_logprobs(tokens, 0, str(version))[start:]
        where = (proximal == version) & (behavior >= 0)
        assert np.array_equal(np.asarray(sample["proximal_logprobs"], np.float32)[where], true[where])
    return float((proximal[behavior >= 0] == behavior[behavior >= 0] + 1).mean())


async def test_a_session_that_waits_for_a_tool_meets_the_next_version_in_the_sweep(engine, client):
    """Both turns of it, with one request that starts at the first sampled token."""
    session = await two_turns(client)
    await engine.update_weights(NOWHERE, "1")

    report = await sweep(client, 1)

    [sample] = await client.samples(session)
    sampled = sum(version >= 0 for version in sample["behavior_versions"])
    assert scored_share(sample) == 1.0
    assert sample["metadata"]["staleness"]["proximal_share"] == 1.0
    assert engine.scored == [(len(sample["tokens"]) - sample["response_length"], len(sample["tokens"]))]
    assert engine.sessions == [session.session_id]
    assert (report["sessions"], report["requests"], report["tokens_left"]) == (1, 1, 0)
    assert report["tokens_waiting"] == report["tokens_settled"] == sampled
    assert not report["is_running"]


async def test_what_was_swept_survives_a_restart(tmp_path):
    """Scores are durable when the sweep answers (I9)."""
    engine = Engine()
    async with serving_with(engine, store=tmp_path / "store.sqlite") as client:
        session = await two_turns(client)
        await engine.update_weights(NOWHERE, "1")
        await sweep(client, 1)
        before = await client.samples(session)

    async with serving_with(engine, store=tmp_path / "store.sqlite") as client:
        assert await client.samples(session) == before


async def test_a_sweep_ends_with_its_budget_and_counts_what_it_did_not_reach(engine, client):
    """The tokens left keep their behavior values."""
    session = await two_turns(client)
    await engine.update_weights(NOWHERE, "1")
    engine.may_score.clear()

    report = await sweep(client, 1, budget_s=0.05)

    [sample] = await client.samples(session)
    assert report["tokens_left"] == report["tokens_waiting"] > 0
    assert sample["proximal_versions"] == sample["behavior_versions"]
    assert sample["proximal_logprobs"] == sample["rollout_log_probs"]


async def test_sessions_that_live_longest_go_first_a_bounded_number_at_a_time():
    """Concurrency 2: with the engine stuck, only the two oldest have been asked for."""
    engine = Engine(ScriptStep(text="x"))
    async with serving_with(engine) as client:
        lengths = []
        for number in range(4):
            session = await client.create()
            await client.say(session, [user("q" * (10 * number + 1))])
            lengths.append(len((await client.samples(session))[0]["tokens"]))
        await engine.update_weights(NOWHERE, "1")
        engine.may_score.clear()
        running = asyncio.create_task(sweep(client, 1, concurrency=2))
        await eventually(lambda: len(engine.scored) == 2)

        progress = (await client.http.get("/sessions/sweep")).json()

        assert [end for _, end in engine.scored] == lengths[:2]
        assert (progress["is_running"], progress["sessions"], progress["sessions_done"]) == (True, 4, 0)
        engine.may_score.set()
        assert (await running)["sessions_done"] == 4
        assert [end for _, end in engine.scored] == lengths


async def test_branches_that_share_a_prefix_score_it_once(engine, client):
    """The second branch starts behind what the first has settled."""
    session = await client.create(selection="leaves")
    first = await client.say(session, [user("a")])
    for text in ("left", "right"):
        await client.say(session, [user("a"), first, user(text)])
    await engine.update_weights(NOWHERE, "1")

    report = await sweep(client, 1)

    samples = await client.samples(session)
    turns = (await client.record(session))["turns"]
    assert [scored_share(sample) for sample in samples] == [1.0, 1.0]
    assert [start for start, _ in engine.scored] == [len(turns[0]["prompt_ids"]), len(turns[2]["prompt_ids"])]
    assert report["tokens_settled"] == report["tokens_waiting"]


async def test_a_session_that_filled_its_context_is_scored_but_for_its_last_token():
    """No server reads an input that leaves no room for a token; the one token that does not fit is counted."""

    class Strict(Engine):
        async def score(self, input_ids, *, start, session_id=None):
            one_token = SamplingParams(max_new_tokens=1)
            check_request(self.capabilities, GenerationRequest(input_ids, one_token, "", prompt_logprobs_from=start))
            return await super().score(input_ids, start=start)

    engine = Strict(ScriptStep(text="a long answer " * 4))
    engine.capabilities = replace(engine.capabilities, context_length=40)
    async with serving_with(engine) as client:
        session = await client.create()
        await client.say(session, [user("a")])
        await engine.update_weights(NOWHERE, "1")

        report = await sweep(client, 1)

        [sample] = await client.samples(session)
        assert (len(sample["tokens"]), sample["status"]) == (40, "truncated")
        assert sample["proximal_versions"] == [1] * (sample["response_length"] - 1) + [0]
        assert (report["tokens_left"], report["requests"], report["failures"]) == (1, 1, {})


async def test_of_a_drained_session_only_what_will_be_delivered_is_scored(engine, client):
    """An open session may continue from any branch, a closed one delivers the selected one."""
    session = await client.create(selection="one")
    await client.say(session, [user("one answer")])
    await client.say(session, [user("a")])
    await engine.update_weights(NOWHERE, "1")
    await client.http.post("/sessions/drain")

    report = await sweep(client, 1)

    [sample] = await client.samples(session)
    assert scored_share(sample) == 1.0
    assert report["requests"] == 1


async def test_a_sweep_of_a_version_that_is_not_live_is_refused(engine, client):
    """After the update it is too late; nothing is asked of the engine."""
    await two_turns(client)
    await engine.update_weights(NOWHERE, "2")

    answer = await client.http.post("/sessions/sweep", json={"version": 1})

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "version")
    assert "live version 2" in answer.json()["error"]["message"]
    assert engine.scored == []


@pytest.mark.parametrize(
    ("body", "param"),
    [({}, "body"), ({"version": -1}, "version"), ({"version": 1, "budget_s": 0}, "budget_s"), ({"vresion": 1}, "body")],
)
async def test_a_sweep_that_is_not_understood_is_refused(body, param):
    """The answer names the field."""
    async with serving_with(Engine()) as client:
        answer = await client.http.post("/sessions/sweep", json=body)

        assert answer.status_code == 400
        assert answer.json()["error"]["message"].startswith(f"{param}: ")


async def test_tokens_on_another_scale_are_counted_and_left_alone(engine, client):
    """At temperature 0.7 after-temperature logprobs and raw prompt logprobs do not mix."""
    engine.capabilities = replace(engine.capabilities, logprob_scale=LogprobScale.AFTER_TEMPERATURE)
    heated = await two_turns(client, sampling={"temperature": 0.7})
    plain = await two_turns(client, sampling={"temperature": 1.0})
    await engine.update_weights(NOWHERE, "1")

    report = await sweep(client, 1)

    assert scored_share((await client.samples(heated))[0]) == 0.0
    assert scored_share((await client.samples(plain))[0]) == 1.0
    assert report["tokens_incomparable"] > 0
    assert report["tokens_left"] == 0


async def test_a_request_that_fails_costs_its_own_branch_and_is_not_made_again():
    """The branches before and after it are scored; the tokens of the failed one are counted and left alone."""

    class Rejecting(Engine):
        async def score(self, input_ids, *, start, session_id=None):
            scoring = await super().score(input_ids, start=start)
            if len(self.scored) == 2:
                raise EngineRejected("not this branch")
            return scoring

    engine = Rejecting()
    async with serving_with(engine) as client:
        session = await client.create(selection="leaves")
        for text in ("first", "second", "third"):
            await client.say(session, [user(text)])
        await engine.update_weights(NOWHERE, "1")

        report = await sweep(client, 1)

        first, second, third = await client.samples(session)
        assert [scored_share(sample) for sample in (first, second, third)] == [1.0, 0.0, 1.0]
        assert [end for _, end in engine.scored] == [len(sample["tokens"]) for sample in (first, second, third)]
        assert (report["requests"], report["failures"], report["sessions_done"]) == (3, {"engine_rejected": 1}, 1)
        assert report["tokens_left"] == second["response_length"]


async def test_a_turn_in_flight_is_left_to_the_request_that_makes_it():
    """Its recorded ancestors are scored; the partial has no outcome yet."""
    engine = Engine(ScriptStep(text="one"), ScriptStep(text="two", token_delay_s=60))
    async with serving_with(engine) as client:
        session = await client.create()
        first = await client.say(session, [user("a")])
        asking = asyncio.create_task(client.chat(session, [user("a"), first, user("b")]))
        await client.turns_in_flight(1)
        await engine.update_weights(NOWHERE, "1")

        report = await sweep(client, 1)

        turns = (await client.record(session))["turns"]
        assert report["tokens_settled"] == len(turns[0]["output_ids"])
        await client.http.post("/sessions/drain")
        await engine.abort(None)
        await asking


async def test_a_turn_that_was_taken_up_again_is_left_to_the_request_that_goes_on_with_it():
    """Its first part is recorded and waits, and another outcome of it is on its way to the store."""
    engine = Engine(ScriptStep(text="a slow answer", token_delay_s=60))
    async with serving_with(engine) as client:
        session = await left_in_a_turn(client)
        await engine.update_weights(NOWHERE, "1")
        again = asyncio.create_task(client.chat(session, [user("a")]))
        await client.sampling()
        by_the_turn = list(engine.scored)

        report = await sweep(client, 1)

        assert (report["tokens_waiting"], engine.scored) == (0, by_the_turn)
        await client.http.post("/sessions/drain")
        await engine.abort(None)
        await again


async def left_in_a_turn(client: Client) -> Served:
    """A session whose client left when its turn was being sampled."""
    session = await client.create()
    gone = asyncio.create_task(client.chat(session, [user("a")]))
    await client.sampling()
    gone.cancel()
    await eventually(lambda: not client.server.sessions.in_memory(session.session_id).turns_in_flight)
    return session


async def a_turn_left_and_swept(client: Client) -> Served:
    """A session whose client left when two tokens of its turn were sampled, which version 1 has scored since."""
    session = await left_in_a_turn(client)
    await client.engine.update_weights(NOWHERE, "1")
    await sweep(client, 1)
    return session


LEFT = ScriptStep(text="slow", fault=ScriptedFault.HANG, fault_after=2)


async def test_a_turn_that_goes_on_keeps_the_values_that_a_sweep_gave_its_first_part():
    """No request of its own meets that version again: what the sweep has found is all that there ever is."""
    async with serving_with(Engine(LEFT)) as client:
        session = await a_turn_left_and_swept(client)
        await client.engine.update_weights(NOWHERE, "2")
        await client.say(session, [user("a")])
        [sample] = await client.samples(session)

    assert sample["behavior_versions"] == [0, 0, 2, 2, 2]
    assert sample["proximal_versions"] == [1, 1, 2, 2, 2]
    assert scored_share(sample) == 2 / 5


class FullStore(MemoryStore):
    """Has no room for the first turn that comes to its end."""

    is_full = True

    async def commit(self, session_id: str, turn: Turn) -> None:
        if turn.is_usable and self.is_full:
            self.is_full = False
            raise StoreError("the disk is full")


async def test_a_turn_that_begins_again_has_no_values_of_tokens_that_were_lost():
    """Its outcome could not be stored: the retry samples it anew, and nobody has scored that."""
    async with serving_with(Engine(LEFT, ScriptStep(text="slow")), store=FullStore()) as client:
        session = await a_turn_left_and_swept(client)
        assert (await client.chat(session, [user("a")])).status_code == 503
        await client.engine.update_weights(NOWHERE, "2")
        await client.say(session, [user("a")])
        [sample] = await client.samples(session)

    assert sample["behavior_versions"] == sample["proximal_versions"] == [2] * 5


async def test_a_session_that_is_taken_over_meanwhile_is_swept_in_its_successor(engine, client):
    """What the report calls settled is settled in a session that somebody will collect."""
    session = await two_turns(client)
    await engine.update_weights(NOWHERE, "1")
    await client.http.post("/sessions/drain")
    await client.http.post("/sessions/resume")
    engine.may_score.clear()
    sweeping = asyncio.create_task(sweep(client, 1))
    await eventually(lambda: len(engine.scored) == 1)
    successor = await client.create(resumes=session.session_id)
    engine.may_score.set()
    report = await sweeping
    [sample] = await client.samples(successor)

    assert scored_share(sample) == 1.0
    assert (report["tokens_settled"], report["tokens_left"]) == (sum(sample["loss_mask"]), 0)


class SlowStore(SQLiteStore):
    """Scores wait before they reach the disk, turns before they are known to be on it."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.scores, self.turns = asyncio.Event(), asyncio.Event()
        self.scores.set()
        self.turns.set()
        self.scores_waiting = self.turns_on_disk = 0

    async def keep_scores(self, *given) -> None:
        self.scores_waiting += 1
        await self.scores.wait()
        await super().keep_scores(*given)

    async def commit(self, *given) -> None:
        await super().commit(*given)
        self.turns_on_disk += 1
        await self.turns.wait()


async def test_scores_of_a_turn_that_goes_on_meanwhile_do_not_meet_its_new_outcome(tmp_path):
    """The sweep has scored its first part, the disk already has the whole of it: the file can be read again."""
    engine = Engine(ScriptStep(text="one"), ScriptStep(text="a slow answer", fault=ScriptedFault.HANG, fault_after=4))
    store = SlowStore(tmp_path / "s.db")
    async with serving_with(engine, store=store) as client:
        session = await client.create()
        first = await client.say(session, [user("a")])
        messages = [user("a"), first, user("b")]
        gone = asyncio.create_task(client.chat(session, messages))
        await client.sampling()
        gone.cancel()
        await eventually(lambda: store.turns_on_disk == 2)
        await engine.update_weights(NOWHERE, "1")
        store.scores.clear()
        store.turns.clear()
        sweeping = asyncio.create_task(sweep(client, 1))
        await eventually(lambda: store.scores_waiting == 1)
        again = asyncio.create_task(client.chat(session, messages))
        await eventually(lambda: store.turns_on_disk == 3)
        store.scores.set()
        await sweeping
        store.turns.set()
        assert (await again).status_code == 200
        [before] = await client.samples(session)
    async with serving_with(Engine(), store=tmp_path / "s.db") as client:
        [after] = await client.samples(session)

    assert after["tokens"] == before["tokens"]
    assert scored_share(after) > 0


async def test_a_worker_that_missed_an_update_serves_nobody_until_it_caught_up():
    """The server asks its workers itself, and fences the one that reports another version."""
    workers = [Engine(), Engine()]
    pool = EnginePool(workers)
    async with serving_with(pool) as client:
        await workers[0].update_weights(NOWHERE, "1")

        behind = (await client.http.post("/sessions/weights", json={"version": 1})).json()
        session = await two_turns(client)
        [sample] = await client.samples(session)
        await workers[1].update_weights(NOWHERE, "2")
        await workers[0].update_weights(NOWHERE, "2")
        caught_up = (await client.http.post("/sessions/weights", json={"version": 2})).json()

        assert behind == {"version": 1, "serving": {"0": "1"}, "fenced": {"1": "0"}, "problems": []}
        assert sample["weight_versions"] == ["1"]
        assert caught_up == {"version": 2, "serving": {"0": "2", "1": "2"}, "fenced": {}, "problems": []}


async def test_no_worker_is_fenced_when_none_has_the_version():
    """Old weights serve better than none."""
    pool = EnginePool([Engine(), Engine()])
    async with serving_with(pool) as client:
        found = (await client.http.post("/sessions/weights", json={"version": 1})).json()

        assert found == {"version": 1, "serving": {"0": "0", "1": "0"}, "fenced": {}, "problems": []}
        assert (await client.say(await client.create(), [user("a")])) == assistant("one")


async def test_a_sweep_over_many_sessions_lets_others_get_on(engine, client):
    """Counting what waits, before and after, is done session by session: nobody waits for all of it."""
    for _ in range(30):
        await client.create()
    store = open_store("memory")
    asked = Sweep(engine, LiveVersion(engine, store, patience_s=1), store, client.server.sessions, SweepRequest(0))
    rounds = 0
    sweeping = asyncio.create_task(asked.run())
    while not sweeping.done():
        rounds += 1
        await asyncio.sleep(0)

    assert (await sweeping).tokens_left == 0
    assert rounds > 60


async def test_a_turn_that_ends_while_a_sweep_counts_is_scored(engine, client):
    """Although nothing waited when it was the turn of its session to be counted."""

    class LateSessions:
        """The sessions of a server, of which the count finds none yet."""

        def __init__(self, sessions):
            self._sessions = sessions
            self._found = iter([[]])
            self.in_memory, self.borrow = sessions.in_memory, sessions.borrow

        def __iter__(self):
            return iter(next(self._found, self._sessions))

    await two_turns(client)
    await engine.update_weights(NOWHERE, "1")
    store = open_store("memory")
    live = LiveVersion(engine, store, patience_s=1)
    report = await Sweep(engine, live, store, LateSessions(client.server.sessions), SweepRequest(1)).run()

    assert report.tokens_settled == report.tokens_waiting > 0
    assert (report.sessions, report.sessions_done, report.tokens_left, report.failures) == (1, 1, 0, {})
