"""Aborts, drains, pauses, sweeps, page-outs, clients that leave, rewrites, duplicates, kills: any order of them.

Checked after every step.

The server is the real application on a real store; requests stay in flight across steps, so everything interleaves
with everything. A kill drops the server without goodbye, with whatever it was doing. What holds is read from the file
by `stored`, which knows nothing of our code. `HARNESS_SOAK_EXAMPLES` runs more examples.
"""

import asyncio
import gc
import os
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from zlib import crc32

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from harness.engines.base import PauseMode
from harness.engines.scripted import Script, ScriptedEngine, ScriptedFault, ScriptStep, scripted_logprobs
from harness.server.app import SessionServer
from harness.server.store.sqlite import SQLiteStore
from harness.server.store.writer import _Stop
from harness.token_rows import RowState
from harness.types import FinishReason, as_ids
from tests.builders import body, tool, toy_template, toy_tokenizer, turn_service, user
from tests.session_servers import true_rows
from tests.session_servers.asgi_client import Answer, Exchange
from tests.session_servers.asked_bodies import is_digest_of
from tests.session_servers.remembered import Remembered
from tests.session_servers.store_file import ledger_of, read_file

PATIENCE_S = 60
A_MOMENT_S = 0.002
SLOW_S = 0.0002
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
STEPS = st.lists(
    st.sampled_from(
        [
            ScriptStep(text="yes"),
            ScriptStep(text="slow and long", token_delay_s=SLOW_S),
            ScriptStep(text="never", fault=ScriptedFault.HANG, fault_after=2, token_delay_s=SLOW_S),
            ScriptStep(text=CALL, token_delay_s=SLOW_S),
            ScriptStep(text="<tool_call>broken"),
            ScriptStep(text="no <|im_end|> ünï"),
            ScriptStep(text=""),
            ScriptStep(tokens=(5, 6, 7, 250, 251)),
            ScriptStep(text="cut", finish=FinishReason.LENGTH),
            ScriptStep(text="a partial", fault=ScriptedFault.ABORT, fault_after=3),
            ScriptStep(text="nothing", fault=ScriptedFault.ABORT),
            ScriptStep(text="x", fault=ScriptedFault.UNAVAILABLE),
            ScriptStep(text="xyz", fault=ScriptedFault.DISCONNECT, fault_after=2),
            ScriptStep(text="x", fault=ScriptedFault.REJECT),
        ]
    ),
    min_size=1,
    max_size=8,
)
NUMBER = st.integers(0, 1_000)
WORDS = st.sampled_from(["continue", "ü", "", "<|im_start|>assistant\n"])
FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "max_tokens": st.integers(1, 6),
        "stop": st.just("n"),
        "tool_choice": st.sampled_from(["auto", "none", "required"]),
    },
)
RETRY = st.sampled_from([{}, {}, {"x-stainless-retry-count": "1"}])
EXPECTED = {200, 400, 404, 502, 503}


@dataclass
class Asked:
    """A request of an agent, as the agent knows it."""

    exchange: Exchange
    body: bytes
    messages: list[dict]
    continues: tuple | None
    """The answer that its messages end with."""
    has_left: bool = False
    is_harvested: bool = False

    headers: dict[str, str] = field(default_factory=dict)
    fields: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        answer = self.exchange.answer
        return f"{crc32(self.body):08x} {self.headers} left={self.has_left} answered={answer and answer.status}"

    @property
    def is_waiting(self) -> bool:
        return not self.has_left and not self.exchange.has_whole_answer

    @property
    def was_answered(self) -> bool:
        answer = self.exchange.answer
        return answer is not None and answer.status == 200


@dataclass
class Known(Remembered):
    """A session, what its clients may say next, and what they have asked."""

    histories: list[tuple[list[dict], tuple | None]] = field(default_factory=lambda: [([user("begin")], None)])
    requests: list[Asked] = field(default_factory=list)
    may_sample: Counter[bytes] = field(default_factory=Counter)
    """How many turns each body may have come to (I5)."""


class DeafEngine(ScriptedEngine):
    """Does not hear that a request is to end, at times."""

    is_deaf = False

    async def abort(self, request_id: str | None) -> int:
        return 0 if self.is_deaf else await super().abort(request_id)


class Live:
    """A server on a loop of its own, so that it can be dropped in the middle of anything."""

    def __init__(self, path: Path, script: Script, version: int, drain_grace_s: float) -> None:
        self.runner = asyncio.Runner()
        self.stack = AsyncExitStack()
        self.run(self._start(path, script, version, drain_grace_s))

    async def _start(self, path: Path, script: Script, version: int, drain_grace_s: float) -> None:
        self.store = await self.stack.enter_async_context(SQLiteStore(path))
        self.engine = await self.stack.enter_async_context(DeafEngine(toy_tokenizer(), script))
        await self.engine.update_weights(path, str(version))
        patience = {"pause_timeout_s": 60.0, "engine_retry_s": 0.0, "drain_grace_s": drain_grace_s}
        patience["idle_page_out_s"] = 0.0
        turns = turn_service(self.engine, toy_template(), self.store, **patience)
        self.server = SessionServer(turns)
        await self.server.sessions.restore()
        self.app = self.server.app()

    def run(self, awaitable: Any) -> Any:
        async def bounded() -> Any:
            async with asyncio.timeout(PATIENCE_S):
                return await awaitable

        return self.runner.run(bounded())

    def kill(self) -> None:
        """From now on nothing of it runs; what its disk had been given is on it."""
        self.store._writer._queue.put(_Stop())
        self.store._writer._thread.join()
        self.store._claim.close()

    def bury(self) -> None:
        """Give back what the operating system would have taken."""

        async def cancel_all() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        self.runner.run(cancel_all())
        self.store._connection.close()
        self.runner.close()


class FaultMachine(RuleBasedStateMachine):
    """One file, the servers that served it one after the other, and their clients."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = TemporaryDirectory()
        self.path = Path(self.folder.name) / "sessions.db"
        self.dead: list[Live] = []
        self.sessions: list[Known] = []
        self.gate = "open"
        self.version = 0
        self.live: Live | None = None

    def teardown(self) -> None:
        """However it went: once the gate and the engine are open again, everybody is answered (I8)."""
        if self.live is not None:
            self.live.engine.is_deaf = False
            self.admin("/sessions/resume")
            self.live.run(self.live.engine.resume())
            waiting = [asked for known in self.sessions for asked in known.requests if not asked.exchange.is_over]
            mine = [asked.exchange.task for asked in waiting if asked.exchange.app is self.live.app]
            self.live.run(self.answered(mine))
            self.harvest()
            self.the_file_is_right()
            self.the_ledger_is_right()
            gate = self.admin("/sessions/gate", "GET")
            assert (gate["state"], gate["held"], gate["turns_in_flight"]) == ("open", 0, 0)
            assert len(self.live.server.callers) == len(self.live.server._turns.admitted) == 0
            self.live.kill()
            self.dead.append(self.live)
        for server in self.dead:
            server.bury()
        self.folder.cleanup()

    async def answered(self, requests: list[asyncio.Task]) -> None:
        """Return when all `requests` are; steps that hang are ended by aborts, which a turn survives a few times."""
        while requests:
            await self.live.engine.abort(None)
            _, still = await asyncio.wait(requests, timeout=A_MOMENT_S)
            requests = list(still)

    def ask_server(self, method: str, path: str, content: bytes = b"") -> Answer:
        async def exchange() -> Answer:
            asked = Exchange(self.live.app, method, path, content)
            await asked.task
            assert asked.answer is not None
            return asked.answer

        return self.live.run(exchange())

    def admin(self, path: str, method: str = "POST") -> Any:
        answer = self.ask_server(method, path)
        assert answer.status == 200, answer.body
        self.harvest()
        return answer.json()

    def known(self, number: int) -> Known:
        """One of the latest sessions: the ones before are mostly closed."""
        latest = self.sessions[-3:]
        return latest[number % len(latest)]

    # Life of servers and sessions

    @initialize(steps=STEPS, drain_grace_s=st.sampled_from([0.0, A_MOMENT_S, 60.0]))
    def begin(self, steps: list[ScriptStep], drain_grace_s: float) -> None:
        self.script, self.drain_grace_s = Script(steps=tuple(steps)), drain_grace_s
        self.live = Live(self.path, self.script, self.version, drain_grace_s)

    @precondition(lambda self: self.gate != "paused" and sum(not known.is_closed for known in self.sessions) < 3)
    @rule(after_incomplete=st.sampled_from(["refuse", "refuse", "serve"]), seed=st.sampled_from([None, 7]))
    def create(self, after_incomplete: str, seed: int | None) -> None:
        config = b'{"after_incomplete": "%s", "sampling": {"seed": %s}, "record": ["routed_experts"]}'
        content = config % (after_incomplete.encode(), b"null" if seed is None else b"%d" % seed)
        answer = self.ask_server("POST", "/sessions", content)
        assert answer.status == (200 if self.gate == "open" else 503)
        if answer.status == 200:
            self.sessions.append(Known(answer.json()["session_id"], after_incomplete == "serve"))

    @precondition(lambda self: len(self.sessions) > 2 and not self.live.engine.is_deaf)
    @rule(which=NUMBER)
    def delete(self, which: int) -> None:
        known = self.known(which)
        assert self.ask_server("DELETE", f"/sessions/{known.session_id}").status == 204
        known.is_closed = True

    @rule()
    def kill_and_restart(self) -> None:
        """Whatever it was doing is gone; a new server takes up the file, open."""
        self.live.kill()
        self.dead.append(self.live)
        for known in self.sessions:
            for asked in known.requests:
                asked.has_left |= not asked.exchange.has_whole_answer
        self.live = Live(self.path, self.script, self.version, self.drain_grace_s)
        self.gate = "open"

    @precondition(lambda self: not self.live.engine.is_deaf)
    @rule()
    def stop_and_restart(self) -> None:
        """A server that is told to end answers everybody; what it cut short is in the file for the next one."""
        self.live.run(self.live.server.callers.send_away(grace_s=0.0))
        mine = [asked for known in self.sessions for asked in known.requests if asked.exchange.app is self.live.app]
        for asked in mine:
            self.live.run(asyncio.wait([asked.exchange.task]))
        self.harvest()
        assert all(asked.has_left or asked.exchange.has_whole_answer for asked in mine)
        self.kill_and_restart()

    @precondition(lambda self: self.sessions and not self.live.engine.is_deaf)
    @rule(which=NUMBER)
    def end(self, which: int) -> None:
        """Its owner collects: nothing of it is in flight then, and nobody of it waits."""
        known = self.known(which)
        facts = self.admin(f"/sessions/{known.session_id}/end")
        assert facts["turns_in_flight"] == 0
        known.is_closed = True
        mine = [asked for asked in known.requests if asked.exchange.app is self.live.app]
        for asked in mine:
            self.live.run(asyncio.wait([asked.exchange.task]))
        self.harvest()

    # Agents

    @precondition(lambda self: self.sessions)
    @rule(turns=st.lists(st.tuples(NUMBER, NUMBER, WORDS, st.just({}) | FIELDS), min_size=1, max_size=5))
    def take_turns(self, turns: list[tuple[int, int, str, dict[str, Any]]]) -> None:
        """The last histories first: agents mostly continue where they are."""
        for which, history, word, fields in turns:
            known = self.known(which)
            messages, continues = known.histories[-1 - history % len(known.histories)]
            self.send(known, [*messages, user(word)], continues, {}, fields)

    @precondition(lambda self: self.sessions)
    @rule(which=NUMBER, history=NUMBER, position=NUMBER, word=WORDS)
    def rewrite(self, which: int, history: int, position: int, word: str) -> None:
        """A client that changes what was said before."""
        known = self.known(which)
        messages, _ = known.histories[-1 - history % len(known.histories)]
        place = position % len(messages)
        changed = messages[place] | {"content": f"rewritten {word}"}
        self.send(known, [*messages[:place], changed, *messages[place + 1 :]], None, {}, {})

    @precondition(lambda self: any(known.requests for known in self.sessions))
    @rule(which=NUMBER, request=NUMBER, headers=RETRY)
    def send_again(self, which: int, request: int, headers: dict[str, str]) -> None:
        """The same bytes: a retry, or another sample; the client may say which."""
        talkative = [known for known in self.sessions if known.requests]
        known = talkative[which % len(talkative)]
        asked = known.requests[request % len(known.requests)]
        self.send(known, asked.messages, asked.continues, headers, asked.fields)

    @precondition(lambda self: not self.live.engine.is_deaf)
    @rule(which=NUMBER)
    def hang_up(self, which: int) -> None:
        """One of those who wait, if anybody does: whether is a matter of time, so no precondition asks."""
        waiting = [asked for known in self.sessions for asked in known.requests if asked.is_waiting]
        for asked in waiting[which % (len(waiting) or 1) :][:1]:
            asked.has_left = True
            asked.exchange.leave()
            self.live.run(asyncio.wait([asked.exchange.task]))

    @rule()
    def wait(self) -> None:
        self.live.run(asyncio.sleep(5 * A_MOMENT_S))
        self.harvest()

    def send(
        self,
        known: Known,
        messages: list[dict],
        continues: tuple | None,
        headers: dict[str, str],
        fields: dict[str, Any],
    ) -> None:
        content = body(messages, logprobs=True, tools=[tool("add")], **fields)
        before = [asked for asked in known.requests if asked.body == content]
        is_another = not before or ((before[-1].is_waiting or before[-1].was_answered) and not headers)
        known.may_sample[content] += is_another

        async def begin() -> Exchange:
            path = f"/sessions/{known.session_id}/v1/chat/completions"
            exchange = Exchange(self.live.app, "POST", path, content, headers)
            await asyncio.wait([exchange.task], timeout=A_MOMENT_S)
            return exchange

        asked = Asked(self.live.run(begin()), content, messages, continues, headers=headers, fields=fields)
        known.requests.append(asked)
        self.harvest()

    def harvest(self) -> None:
        for known in self.sessions:
            for asked in known.requests:
                answer = asked.exchange.answer
                if answer is not None and not asked.is_harvested and not asked.has_left:
                    asked.is_harvested = True
                    self.read(known, asked, answer)

    def read(self, known: Known, asked: Asked, answer: Answer) -> None:
        assert answer.status in EXPECTED, answer.body
        if answer.status == 404:
            assert answer.headers["x-should-retry"] == "false"
        if answer.status != 200:
            return
        added, key = known.hear(answer.json(), asked.continues, "2")
        known.histories.append(([*asked.messages, *added], key))

    # Operators and engines

    @rule(verb=st.sampled_from(["pause", "pause", "pause", "drain", "resume", "resume", "resume"]))
    def turn_the_gate(self, verb: str) -> None:
        self.gate = self.admin(f"/sessions/{verb}")["state"]
        for known in self.sessions:
            known.is_closed |= verb == "drain"
        if verb == "drain" and self.drain_grace_s < 1:
            self.live.run(self.nothing_in_flight())

    async def nothing_in_flight(self) -> None:
        """Return when every drained turn has its outcome: whatever the engine does, the grace is over."""
        while any(session.turns_in_flight for session in self.live.server.sessions):
            await asyncio.sleep(A_MOMENT_S)

    @rule(is_deaf=st.booleans())
    def deafen_the_engine(self, is_deaf: bool) -> None:
        self.live.engine.is_deaf = is_deaf

    @rule()
    def abort_the_engine(self) -> None:
        self.live.run(self.live.engine.abort(None))
        self.live.run(asyncio.sleep(A_MOMENT_S))
        self.harvest()

    @rule(mode=st.sampled_from(list(PauseMode)))
    def pause_the_engine(self, mode: PauseMode) -> None:
        self.live.run(self.live.engine.pause(mode))

    @rule()
    def resume_the_engine(self) -> None:
        self.live.run(self.live.engine.resume())

    @rule()
    def update_the_weights(self) -> None:
        self.version += 1
        self.live.run(self.live.engine.update_weights(self.path, str(self.version)))

    @rule()
    def sweep(self) -> None:
        """Whatever waits for the weights of now is scored, wherever it is."""
        answer = self.ask_server("POST", "/sessions/sweep", b'{"version": %d, "budget_s": 0.5}' % self.version)
        assert (answer.status, answer.json()["failures"]) == (200, {})
        self.harvest()

    @rule()
    def page_out(self) -> None:
        """Sessions of which nothing is under way are in the file alone."""
        self.live.run(self.live.server.sessions.page_out_idle())
        gc.collect()  # what was raised in a session keeps it alive, and then it would be that object again
        self.harvest()

    # What always holds

    @invariant()
    def the_file_is_right(self) -> None:
        """Prompts extend their parents (I1, by `read_file`); answers are there, below what they continue (I9); no body
        came to more turns than its requests asked for (I5); no two turns share a seed; drained is drained.
        """
        if self.live is None:
            return
        file = read_file(self.path)
        for known in self.sessions:
            session = file[known.session_id]
            digests = [turn.request_digest for turn in session.turns.values()]
            sampled = Counter(body for digest in digests for body in known.may_sample if is_digest_of(body, digest))
            assert sampled.total() == len(digests)
            known.must_agree(session)
            assert sampled <= known.may_sample, [str(asked) for asked in known.requests]

    @invariant()
    def the_ledger_is_right(self) -> None:
        """What the server reports is what the rows add up to, and what its samples deliver (I3, I4)."""
        if self.live is None:
            return
        for known in self.sessions:
            for _ in range(200):  # turns continue while we look: there must be a moment at which all three agree
                differing = self.differing(known)
                if not differing:
                    break
                self.live.run(asyncio.sleep(A_MOMENT_S))
            assert not differing

    def differing(self, known: Known) -> list[object]:
        """The server's ledger, that of the file, and what the samples deliver; nothing when they agree."""
        record = self.ask_server("GET", f"/sessions/{known.session_id}").json()
        if record["phase"] == "unknown":
            return []
        stored = ledger_of(read_file(self.path)[known.session_id], record)
        samples = self.ask_server("GET", f"/sessions/{known.session_id}/samples").json()["samples"]
        trained = sum(sum(sample["loss_mask"]) for sample in samples)
        for sample in samples:
            proximal_values_must_be_true(sample)
        if record["ledger"] != stored or trained != stored["trained"]:
            return [record["ledger"], stored, trained]
        broken = {turn["turn"] for turn in record["turns"] if turn["unknown"]}
        for sample in samples:
            true_rows.must_be_true(
                sample, {RowState.LOST} if broken.intersection(sample["metadata"]["turns"]) else set()
            )
        return []


def proximal_values_must_be_true(sample: Any) -> None:
    """Each sampled token has the logprob of the version after its own, or still that of its own (I7)."""
    behavior, proximal = as_ids(sample["behavior_versions"]), as_ids(sample["proximal_versions"])
    sampled = behavior >= 0
    assert np.isin(proximal[sampled] - behavior[sampled], (0, 1)).all()
    tokens, start = as_ids(sample["tokens"]), len(sample["tokens"]) - sample["response_length"]
    logprobs = np.asarray(sample["proximal_logprobs"], np.float32)
    for version in set(proximal[sampled].tolist()):
        where = sampled & (proximal == version)
        assert np.array_equal(logprobs[where], scripted_logprobs(tokens, 0, str(version))[start:][where])


@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("quiet_logs")
def test_any_order_of_faults_leaves_a_file_that_is_right():
    """Invariants I1 to I5, I7 to I9, and I12."""
    run_state_machine_as_test(
        FaultMachine,
        settings=settings(
            max_examples=int(os.environ.get("HARNESS_SOAK_EXAMPLES", "20")),
            stateful_step_count=60,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
