"""A conversation served by the real session server over HTTP, judged by what the engine itself wrote down.

The client sends back what it got, as clients do; it alone knows which answer a request continues. The engine logs the
ids it read and the ids it sampled. From these two follows what must hold (I1): where a turn continues an answer, its
input begins with the input and the output of that turn, bit by bit, and continues with what the official template says
there. Where the server says that it began a new branch, its input is the official prompt of the whole conversation.
"""

import json
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import httpx

from harness.engines.scripted import Script, ScriptedEngine, ScriptStep
from harness.server.app import SessionServer
from harness.server.store.base import MemoryStore
from harness.types import FinishReason, GenerationDelta, GenerationRequest, GenerationResult, Message
from tests.builders import turn_service
from tests.conformance.families.family import Family
from tests.conformance.families.official import official
from tests.conformance.families.sampling import STOP, Ending, Plan, Step

_RESULT = "Paris"


class Logged(NamedTuple):
    """One request, as the engine saw it."""

    input_ids: list[int]
    output_ids: list[int]


class LoggedEngine(ScriptedEngine):
    """Writes down what it reads and what it samples."""

    log: list[Logged]

    async def stream(self, request: GenerationRequest) -> AsyncIterator[GenerationDelta | GenerationResult]:
        """See `ScriptedEngine.stream`."""
        async for piece in super().stream(request):
            if isinstance(piece, GenerationResult):
                self.log.append(Logged(request.input_ids.tolist(), piece.output_ids.tolist()))
            yield piece


@dataclass(frozen=True)
class Asked:
    """A model call and its answer, as the client knows them."""

    continues: int | None
    """The number of the call whose answer it sent back last; None when it sent none back."""
    messages: tuple[Message, ...]
    known: int
    """How many of the messages end with that answer."""
    reply: Message


@dataclass
class Conversation:
    """What became of a plan."""

    asked: list[Asked] = field(default_factory=list)
    log: list[Logged] = field(default_factory=list)
    """Of the engine; one request for each call."""
    turns: list[Any] = field(default_factory=list)
    """Of the server's record."""
    refusal: str = ""
    """Why the server refused a request; empty when it served them all."""

    @property
    def branches(self) -> int:
        """Calls that continued an answer, and that the server began a new branch for."""
        return sum(
            asked.continues is not None and turn["parent"] is None
            for asked, turn in zip(self.asked, self.turns, strict=True)
        )

    @property
    def continued(self) -> int:
        """Calls that continued an answer."""
        return sum(asked.continues is not None for asked in self.asked)


async def serve_conversation(family: Family, plan: Plan) -> Conversation:
    """Play `plan` with a client, a session server and an engine that samples what the plan says."""
    engine = LoggedEngine(family.chat.tokenizer, Script(tuple(_scripted(step) for step in plan.steps)))
    engine.log = []
    made = Conversation(log=engine.log)
    async with MemoryStore() as store:
        turns = turn_service(engine, family.chat, store)
        try:
            transport = httpx.ASGITransport(app=SessionServer(turns).app())
            async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
                await _converse(http, plan, made)
        finally:
            turns.heavy_work.close()
    return made


def _scripted(step: Step) -> ScriptStep:
    if not step.output_ids:  # a step without ids would say its text, which ends itself
        return ScriptStep(finish=FinishReason.LENGTH)
    return ScriptStep(
        tokens=step.output_ids, finish=FinishReason.LENGTH if step.ending is Ending.LENGTH else FinishReason.STOP
    )


async def _converse(http: httpx.AsyncClient, plan: Plan, made: Conversation) -> None:
    session = (await http.post("/sessions", json={"after_incomplete": "serve"})).json()
    path = f"/sessions/{session['session_id']}"
    for number, step in enumerate(plan.steps):
        continues = number - 1 - step.back if number > step.back else None
        history = _history(plan, made, continues)
        messages = [*history, *_following(step, history, number)]
        body = {"model": "m", "messages": messages, "tools": list(plan.tools) or None}
        if step.ending is Ending.STOP_STRING:
            body["stop"] = [STOP]
        answer = await http.post(f"{path}/v1/chat/completions", content=json.dumps(body))
        if answer.status_code == 400:
            made.refusal = answer.json()["error"]["message"]
            return
        assert answer.status_code == 200, answer.text
        reply = answer.json()["choices"][0]["message"]
        made.asked.append(Asked(continues, tuple(messages), len(history), reply))
    record = (await http.get(f"{path}?ids=prompts")).json()
    made.turns = record["turns"]


def _history(plan: Plan, made: Conversation, continues: int | None) -> list[Message]:
    """What the client sends back up to the answer of the call `continues`; what opens a conversation without one."""
    if continues is None:
        return [] if plan.lead is None else [{"role": plan.lead, "content": "be brief"}]
    before = made.asked[continues]
    kept = {name: value for name, value in before.reply.items() if name != "reasoning_content" or plan.keeps_reasoning}
    return [*before.messages, kept]


def _following(step: Step, history: Sequence[Message], number: int) -> Iterator[Message]:
    """The messages that the client adds: results first, where the last answer made calls.

    Those of users have the number of the call in them: no two requests are the same, or the second would be a retry.
    """
    calls = history[-1].get("tool_calls") or [] if history else []
    texts = [step.texts[i % len(step.texts)] for i in range(len(calls) + len(step.roles))]
    for call, text in zip(calls, texts, strict=False):
        yield {"role": "tool", "tool_call_id": call["id"], "content": f"{_RESULT} {number}: {text}"}
    if not calls or step.back:
        for role, text in zip(step.roles, texts[len(calls) :], strict=True):
            yield {"role": role, "content": f"{text} ({number})" if step.back else f"{number}) {text}"}


def judge(family: Family, plan: Plan, made: Conversation) -> None:
    """Raises `AssertionError` where the engine's log is not what must hold (I1)."""
    assert not made.refusal
    assert len(made.asked) == len(made.log) == len(made.turns)
    for asked, logged, turn in zip(made.asked, made.log, made.turns, strict=True):
        assert turn["prompt_ids"] == logged.input_ids
        assert turn["output_ids"] == logged.output_ids
        if turn["parent"] is None:
            text = official(family).prompt(asked.messages, plan.tools)
            assert_says(family, logged.input_ids, text, [*asked.messages])
            continue
        assert turn["parent"] == asked.continues
        before = made.log[asked.continues]
        known = before.input_ids + before.output_ids
        assert logged.input_ids[: len(known)] == known
        reply, new = made.asked[asked.continues].reply, asked.messages[asked.known :]
        text = official(family).added(asked.messages[: asked.known - 1], reply, new, plan.tools)
        last = family.chat.tokenizer.token_text(before.output_ids[-1]) if before.output_ids else ""
        if last in official(family).ends:  # it was sampled
            text = text.removeprefix(official(family).ends[0])
        assert_says(family, logged.input_ids[len(known) :], text, new)


def assert_says(family: Family, ids: Sequence[int], text: str, messages: Sequence[Message]) -> None:
    """`ids` are those of `text`; only its characters where a message spells a marker, which must not become one."""
    theirs = official(family)
    expected = theirs.encode(text)
    seen, wanted = theirs.decode(ids), theirs.decode(expected)
    assert seen == wanted
    said = json.dumps(messages, ensure_ascii=False)
    if not any(marker in said for marker in family.chat.tokenizer.markers):
        assert list(ids) == expected
