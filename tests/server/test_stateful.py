"""Any order of what agents, owners, operators and engines can do, checked after every step against the file.

The server is the real application in this process, on a real store; a restart drops it without goodbye. What holds is
read from the file by `stored`, which knows nothing of our code. `HARNESS_SOAK_EXAMPLES` runs more examples.
"""

import asyncio
import os
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import pytest
import structlog
from fakes import body, tool, toy_template, toy_tokenizer, user
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
from stored import StoredSession, ledger_of, read_file

from harness.engines.scripted import Script, ScriptedEngine, ScriptedFault, Step
from harness.server.app import SessionServer
from harness.server.settings import ServerSettings
from harness.server.turns import TurnService
from harness.store.connect import open_store
from harness.telemetry.metrics import ServerMetrics
from harness.types import FinishReason

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
STEPS = st.lists(
    st.sampled_from(
        [
            Step(text="yes"),
            Step(text="yes"),
            Step(text="no <|im_end|> ünï"),
            Step(text=CALL),
            Step(text="<tool_call>broken"),
            Step(text=""),
            Step(tokens=(5, 6, 7, 250, 251)),
            Step(text="cut", finish=FinishReason.LENGTH),
            Step(text="a partial", fault=ScriptedFault.ABORT, fault_after=3),
            Step(text="x", fault=ScriptedFault.UNAVAILABLE),
            Step(text="xyz", fault=ScriptedFault.DISCONNECT, fault_after=2),
            Step(text="x", fault=ScriptedFault.REJECT),
        ]
    ),
    min_size=1,
    max_size=8,
)
NUMBER = st.integers(0, 1_000)
WORDS = st.sampled_from(["go on", "", "<|im_start|>assistant\n", " ü "])
FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "max_tokens": st.integers(1, 6),
        "stop": st.just("n"),
        "tool_choice": st.sampled_from(["auto", "none", "required"]),
    },
)
EXPECTED = {200, 400, 404, 502, 503}


class Known:
    """What this test knows of a session, from the answers it got."""

    def __init__(self, session_id: str, *, serves_incomplete: bool) -> None:
        self.session_id = session_id
        self.serves_incomplete = serves_incomplete
        self.histories: list[list[dict]] = [[user("begin")]]
        self.answers: Counter[tuple] = Counter()
        self.is_closed = False


class ServerMachine(RuleBasedStateMachine):
    """One server file and everything that can happen to it."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.folder = TemporaryDirectory()
        self.path = Path(self.folder.name) / "sessions.db"
        self.exits: list[AsyncExitStack] = []
        self.sessions: list[Known] = []
        self.gate = "open"

    def teardown(self) -> None:
        for stack in reversed(self.exits):
            self.runner.run(stack.aclose())
        self.runner.close()
        self.folder.cleanup()

    def run(self, awaitable: Any) -> Any:
        async def bounded() -> Any:
            async with asyncio.timeout(20):
                return await awaitable

        return self.runner.run(bounded())

    async def start(self) -> None:
        stack = AsyncExitStack()
        self.exits.append(stack)
        store = await stack.enter_async_context(open_store(self.path))
        engine = await stack.enter_async_context(ScriptedEngine(toy_tokenizer(), self.script))
        metrics = ServerMetrics()
        turns = TurnService(engine, toy_template(), store, metrics, "m")
        self.server = SessionServer(turns, store, metrics, ServerSettings(pause_timeout_s=0.005))
        await self.server.restore()
        transport = httpx.ASGITransport(app=self.server.app())
        self.http = await stack.enter_async_context(httpx.AsyncClient(transport=transport, base_url="http://server"))
        self.gate = "open"

    def known(self, number: int) -> Known:
        return self.sessions[number % len(self.sessions)]

    @initialize(steps=STEPS)
    def begin(self, steps: list[Step]) -> None:
        self.script = Script(steps=tuple(steps))
        self.run(self.start())

    @rule(after_incomplete=st.sampled_from(["refuse", "serve"]), seed=st.sampled_from([None, 7]))
    def create(self, after_incomplete: str, seed: int | None) -> None:
        config = {"after_incomplete": after_incomplete, "sampling": {"seed": seed}}
        answer = self.run(self.http.post("/sessions", json=config))
        assert answer.status_code == (200 if self.gate == "open" else 503)
        if answer.status_code == 200:
            self.sessions.append(Known(answer.json()["session_id"], serves_incomplete=after_incomplete == "serve"))

    @precondition(lambda self: self.sessions)
    @rule(which=NUMBER, origin=NUMBER, word=WORDS, fields=FIELDS, has_tools=st.booleans())
    def take_turn(self, which: int, origin: int, word: str, fields: dict, *, has_tools: bool) -> None:
        """The next turn of any history; the same history twice is a re-sample."""
        known = self.known(which)
        self.run(self.ask(known, known.histories[origin % len(known.histories)], word, fields, has_tools=has_tools))

    @precondition(lambda self: self.sessions)
    @rule(which=NUMBER, origins=st.lists(NUMBER, min_size=2, max_size=4), word=WORDS)
    def take_turns_at_once(self, which: int, origins: list[int], word: str) -> None:
        known = self.known(which)
        histories = [known.histories[origin % len(known.histories)] for origin in origins]

        async def ask_all() -> None:
            await asyncio.gather(*(self.ask(known, history, word, {}, has_tools=False) for history in histories))

        self.run(ask_all())

    @precondition(lambda self: self.sessions)
    @rule(which=NUMBER, origin=NUMBER, position=NUMBER, word=WORDS)
    def rewrite(self, which: int, origin: int, position: int, word: str) -> None:
        """A client that changes what was said before."""
        known = self.known(which)
        history = known.histories[origin % len(known.histories)]
        place = position % len(history)
        changed = [*history[:place], history[place] | {"content": f"rewritten {word}"}, *history[place + 1 :]]
        self.run(self.ask(known, changed, word, {}, has_tools=False))

    @precondition(lambda self: self.sessions)
    @rule(which=NUMBER)
    def send_nonsense(self, which: int) -> None:
        answer = self.run(self.http.post(self.url(self.known(which)), content=b'{"messages": 3}'))
        assert answer.status_code in (400, 404, 503)

    @rule(verb=st.sampled_from(["drain", "resume", "resume", "pause"]))
    def turn_the_gate(self, verb: str) -> None:
        report = self.run(self.http.post(f"/sessions/{verb}")).json()
        self.gate = report["state"]
        if verb == "drain":
            for known in self.sessions:
                known.is_closed = True

    @precondition(lambda self: self.sessions)
    @rule(which=NUMBER)
    def delete(self, which: int) -> None:
        known = self.known(which)
        assert self.run(self.http.delete(f"/sessions/{known.session_id}")).status_code == 204
        known.is_closed = True

    @rule()
    def restart(self) -> None:
        """The server is dropped as it stands; another one takes up the file."""
        self.run(self.start())

    async def ask(self, known: Known, history: list[dict], word: str, fields: dict, *, has_tools: bool) -> None:
        tools = {"tools": [tool("add")]} if has_tools else {}
        if not has_tools:
            fields = {name: value for name, value in fields.items() if name != "tool_choice"}
        request = body(history, logprobs=True, **fields, **tools)
        answer = await self.http.post(self.url(known), content=request)
        assert answer.status_code in EXPECTED, answer.text
        assert answer.status_code != 200 or (self.gate != "paused" and not known.is_closed)
        if answer.status_code == 404:
            assert answer.headers["x-should-retry"] == "false"
        if answer.status_code == 200:
            self.remember(known, history, word, answer.json())

    def remember(self, known: Known, history: list[dict], word: str, answer: dict) -> None:
        choice = answer["choices"][0]
        assert choice["finish_reason"] != "abort" or known.serves_incomplete
        message = choice["message"]
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": word} for call in message.get("tool_calls") or []
        ]
        known.histories.append([*history, message, *results, user(word)])
        known.answers[answer_key(answer)] += 1

    @staticmethod
    def url(known: Known) -> str:
        return f"/sessions/{known.session_id}/v1/chat/completions"

    @invariant()
    def the_file_is_right(self) -> None:
        """Parents exist and prompts extend them (I1, by `read_file`); every answer is there; nothing reopened."""
        if not self.exits:
            return
        file = read_file(self.path)
        for known in self.sessions:
            session = file[known.session_id]
            assert known.answers <= Counter(stored_key(turn) for turn in session.turns.values())
            assert session.phase == "open" or known.is_closed
            assert session.phase != "open" or not known.is_closed
            self.resamples_have_seeds_of_their_own(session)

    @invariant()
    def the_ledger_is_right(self) -> None:
        """What the server reports is what the rows add up to (I3, I4)."""
        if not self.exits:
            return
        file = read_file(self.path)
        for known in self.sessions:
            record = self.run(self.http.get(f"/sessions/{known.session_id}")).json()
            if record["phase"] != "unknown":
                assert record["ledger"] == ledger_of(file[known.session_id])
                assert record["turns_in_flight"] == 0

    def resamples_have_seeds_of_their_own(self, session: StoredSession) -> None:
        seeds = Counter(turn.seed for turn in session.turns.values() if turn.seed is not None)
        assert not seeds or max(seeds.values()) == 1


def answer_key(answer: dict) -> tuple:
    """What an agent knows of a turn."""
    choice = answer["choices"][0]
    logprobs = tuple(entry["logprob"] for entry in choice["logprobs"]["content"])
    return frozen(choice["message"]), logprobs, answer["usage"]["prompt_tokens"]


def stored_key(turn: Any) -> tuple:
    """The same, from the file."""
    return frozen(turn.reply), tuple(turn.logprobs), len(turn.prompt)


def frozen(message: dict) -> str:
    return repr(sorted(message.items()))


@pytest.fixture(autouse=True)
def _quiet_logs():
    structlog.configure(processors=[drop])
    yield
    structlog.reset_defaults()


def drop(logger: Any, method: str, event: Any) -> Any:
    raise structlog.DropEvent


@pytest.mark.timeout(600)
def test_any_order_of_events_leaves_a_file_that_is_right():
    """Turns, re-samples, rewrites, faults, drains, pauses, deletions and restarts, in any order."""
    run_state_machine_as_test(
        ServerMachine,
        settings=settings(
            max_examples=int(os.environ.get("HARNESS_SOAK_EXAMPLES", "60")),
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
