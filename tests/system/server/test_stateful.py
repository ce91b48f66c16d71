"""Any order of what agents, owners, operators and engines can do, checked after every step against the file.

The server is the real application in this process, on a real store; a restart drops it without goodbye. What holds is
read from the file by `stored`, which knows nothing of our code. `HARNESS_SOAK_EXAMPLES` runs more examples.
"""

import asyncio
import gc
import os
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
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

from harness.engines.scripted import Script, ScriptedEngine, ScriptedFault, ScriptStep
from harness.server.app import SessionServer
from harness.server.store.sqlite import SQLiteStore
from harness.types import FinishReason
from tests.builders import body, tool, toy_template, toy_tokenizer, turn_service, user
from tests.session_servers.remembered import Remembered
from tests.session_servers.store_file import ledger_of, read_file

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
STEPS = st.lists(
    st.sampled_from(
        [
            ScriptStep(text="yes"),
            ScriptStep(text="yes"),
            ScriptStep(text="no <|im_end|> ünï"),
            ScriptStep(text=CALL),
            ScriptStep(text="<tool_call>broken"),
            ScriptStep(text=""),
            ScriptStep(tokens=(5, 6, 7, 250, 251)),
            ScriptStep(text="cut", finish=FinishReason.LENGTH),
            ScriptStep(text="a partial", fault=ScriptedFault.ABORT, fault_after=3),
            ScriptStep(text="x", fault=ScriptedFault.UNAVAILABLE),
            ScriptStep(text="xyz", fault=ScriptedFault.DISCONNECT, fault_after=2),
            ScriptStep(text="x", fault=ScriptedFault.REJECT),
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


@dataclass
class History:
    """Messages that a client may send, and the answer they continue."""

    messages: list[dict]
    has_tools: bool
    continues: tuple | None = None


@dataclass
class Known(Remembered):
    """A session, and what its clients may say next."""

    histories: list[History] = field(
        default_factory=lambda: [History([user("begin")], has_tools=False), History([user("begin")], has_tools=True)]
    )


class ServerMachine(RuleBasedStateMachine):
    """One server file and everything that can happen to it."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.folder = TemporaryDirectory()
        self.path = Path(self.folder.name) / "sessions.db"
        self.exits: list[AsyncExitStack] = []
        self.store: SQLiteStore | None = None
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
        if self.store is not None:
            self.store._claim.close()  # as the operating system does for a process that has died
        self.store = await stack.enter_async_context(SQLiteStore(self.path))
        engine = await stack.enter_async_context(ScriptedEngine(toy_tokenizer(), self.script))
        patience = {"pause_timeout_s": 0.005, "engine_retry_s": 0.0}
        turns = turn_service(engine, toy_template(), self.store, **patience, idle_page_out_s=0.0)
        self.server = SessionServer(turns)
        await self.server.sessions.restore()
        transport = httpx.ASGITransport(app=self.server.app())
        self.http = await stack.enter_async_context(httpx.AsyncClient(transport=transport, base_url="http://server"))
        self.gate = "open"

    def known(self, number: int) -> Known:
        return self.sessions[number % len(self.sessions)]

    @initialize(steps=STEPS)
    def begin(self, steps: list[ScriptStep]) -> None:
        self.script = Script(steps=tuple(steps))
        self.run(self.start())

    @rule(after_incomplete=st.sampled_from(["refuse", "serve"]), seed=st.sampled_from([None, 7]))
    def create(self, after_incomplete: str, seed: int | None) -> None:
        config = {"after_incomplete": after_incomplete, "sampling": {"seed": seed}}
        answer = self.run(self.http.post("/sessions", json=config))
        assert answer.status_code == (200 if self.gate == "open" else 503)
        if answer.status_code == 200:
            self.sessions.append(Known(answer.json()["session_id"], after_incomplete == "serve"))

    @precondition(lambda self: self.sessions)
    @rule(which=NUMBER, turns=st.lists(st.tuples(NUMBER, WORDS, FIELDS), min_size=1, max_size=6))
    def take_turns(self, which: int, turns: list[tuple[int, str, dict]]) -> None:
        """One after the other, the next turn of any history; the same history twice is a re-sample."""
        known = self.known(which)
        for origin, word, fields in turns:
            self.run(self.ask(known, known.histories[origin % len(known.histories)], word, fields))

    @precondition(lambda self: self.sessions)
    @rule(which=NUMBER, origins=st.lists(NUMBER, min_size=2, max_size=4), word=WORDS)
    def take_turns_at_once(self, which: int, origins: list[int], word: str) -> None:
        known = self.known(which)
        histories = [known.histories[origin % len(known.histories)] for origin in origins]

        async def ask_all() -> None:
            await asyncio.gather(*(self.ask(known, history, word, {}) for history in histories))

        self.run(ask_all())

    @precondition(lambda self: self.sessions)
    @rule(which=NUMBER, origin=NUMBER, position=NUMBER, word=WORDS)
    def rewrite(self, which: int, origin: int, position: int, word: str) -> None:
        """A client that changes what was said before."""
        known = self.known(which)
        history = known.histories[origin % len(known.histories)]
        place = position % len(history.messages)
        changed = history.messages[place] | {"content": f"rewritten {word}"}
        messages = [*history.messages[:place], changed, *history.messages[place + 1 :]]
        self.run(self.ask(known, History(messages, history.has_tools), word, {}))

    @precondition(lambda self: self.sessions)
    @rule(which=NUMBER)
    def send_nonsense(self, which: int) -> None:
        answer = self.run(self.http.post(self.url(self.known(which)), content=b'{"messages": 3}'))
        assert answer.status_code in (400, 404, 503)

    @precondition(lambda self: self.gate == "open")
    @rule(verb=st.sampled_from(["pause", "pause", "pause", "drain"]))
    def shut_the_gate(self, verb: str) -> None:
        self.gate = self.run(self.http.post(f"/sessions/{verb}")).json()["state"]
        for known in self.sessions:
            known.is_closed |= verb == "drain"

    @precondition(lambda self: self.gate != "open")
    @rule()
    def open_the_gate(self) -> None:
        self.gate = self.run(self.http.post("/sessions/resume")).json()["state"]

    @precondition(lambda self: self.sessions)
    @rule(which=NUMBER)
    def delete(self, which: int) -> None:
        known = self.known(which)
        assert self.run(self.http.delete(f"/sessions/{known.session_id}")).status_code == 204
        known.is_closed = True

    @rule()
    def page_out(self) -> None:
        """Whatever is idle, which here is everything, is in the file alone."""
        for _ in range(2):  # deliveries of which nobody is sure after a restart are noted first
            self.run(self.server.sessions.page_out_idle())
        gc.collect()  # what was raised in a session keeps it alive, and then it would be that object again

    @rule()
    def restart(self) -> None:
        """The server is dropped as it stands; another one takes up the file."""
        self.run(self.start())

    async def ask(self, known: Known, history: History, word: str, fields: dict) -> None:
        tools: dict = {"tools": [tool("add")]} if history.has_tools else {}
        if not history.has_tools:
            fields = {name: value for name, value in fields.items() if name != "tool_choice"}
        answer = await self.http.post(self.url(known), content=body(history.messages, logprobs=True, **fields, **tools))
        assert answer.status_code in EXPECTED, answer.text
        assert answer.status_code != 200 or (self.gate != "paused" and not known.is_closed)
        if answer.status_code == 404:
            assert answer.headers["x-should-retry"] == "false"
        if answer.status_code == 200:
            self.remember(known, history, word, answer.json())

    def remember(self, known: Known, history: History, word: str, answer: dict) -> None:
        added, key = known.hear(answer, history.continues, word)
        known.histories.append(History([*history.messages, *added, user(word)], history.has_tools, key))

    @staticmethod
    def url(known: Known) -> str:
        return f"/sessions/{known.session_id}/v1/chat/completions"

    @invariant()
    def the_file_is_right(self) -> None:
        """Parents exist, prompts extend them (I1, by `read_file`); every answer is there, below the one it continues;
        no two model calls share a seed; what was drained or deleted is so for good.
        """
        if not self.exits:
            return
        file = read_file(self.path)
        for known in self.sessions:
            known.must_agree(file[known.session_id])

    @invariant()
    def the_ledger_is_right(self) -> None:
        """What the server reports is what the rows add up to (I3, I4)."""
        if not self.exits:
            return
        file = read_file(self.path)
        for known in self.sessions:
            record = self.run(self.http.get(f"/sessions/{known.session_id}")).json()
            if record["phase"] != "unknown":
                assert record["ledger"] == ledger_of(file[known.session_id], record)
                assert record["turns_in_flight"] == 0


@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("quiet_logs", "fresh_heap")
def test_any_order_of_events_leaves_a_file_that_is_right():
    """Turns, re-samples, rewrites, faults, drains, pauses, deletions, page-outs and restarts, in any order."""
    run_state_machine_as_test(
        ServerMachine,
        settings=settings(
            max_examples=int(os.environ.get("HARNESS_SOAK_EXAMPLES", "60")),
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
