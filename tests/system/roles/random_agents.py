"""Random agents whose every call has a role that its maker knows.

They compact, start subagents, ask for titles, retry, re-sample, run programs that call, and are drained.

An agent is a generator of calls. It is played twice: once against replies that are made up, which tells what an engine
has to say, and then against a server whose engine says that.
"""

import asyncio
import random
from collections.abc import Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

from harness.engines.scripted import ScriptedFault, ScriptStep
from harness.samples.roles import Role
from harness.types import Json, Message
from tests.builders import tool
from tests.session_servers.served import Client, Served, bearer, eventually, url_of

OWN, OTHER = {"user-agent": "agent/1.0"}, {"user-agent": "curl/8.5.0"}


@dataclass(slots=True, eq=False)
class Call:
    """One model call and what its maker knows of it."""

    messages: list[Message]
    tools: list[Json]
    text: str
    role: Role
    headers: dict[str, str] = field(default_factory=lambda: OWN)
    is_refused_once: bool = False
    """The engine rejects it the first time, and the agent asks again."""
    is_repeated: bool = False
    """The agent asks once more for the answer that it got."""
    attempt: str = ""
    """It is one at a summary: `inline`, or `apart` with a system prompt of its own."""
    used_by: "Call | None" = None
    """The call whose prompt has its text."""
    drained_after: int | None = None
    """The session is drained after so many tokens of it."""


Calls = Generator[Call, Message, None]


class RandomAgent:
    """An agent of one seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._words = count()
        self.has_tools = self._random.random() < 0.8

    def text(self, words: int = 9) -> str:
        """Words that nobody has said before."""
        return " ".join(f"w{next(self._words)}" for _ in range(words))

    def chance(self, share: float) -> bool:
        """Happens in that share of all cases."""
        return self._random.random() < share

    def run(self) -> Calls:
        """The whole agent."""
        tools = [tool("look", n={"type": "integer"})] if self.has_tools else []
        system = [{"role": "system", "content": "You are an agent. " + self.text()}]
        task = {"role": "user", "content": self.text()}
        if self.chance(0.4):
            yield from self.title(task)
        history = [*system, task]
        for step in range(self._random.randint(2, 5)):
            history = yield from self.turn(history, tools, Role.MAIN, depth=0)
            if step and self.chance(0.35):
                history = yield from self.compact(system, history, tools)

    def title(self, task: Message) -> Calls:
        """A title for the session, which nobody reads."""
        system = {"role": "system", "content": "Write a title of three words."}
        yield Call([system, task], [], self.text(3), Role.SIDE)

    def turn(
        self, history: list[Message], tools: list[Json], role: Role, depth: int
    ) -> Generator[Call, Message, list[Message]]:
        """A call, perhaps asked twice, and what follows from it; the history for the next one."""
        said = self.text()
        has_call = bool(tools) and self.chance(0.7)
        text = said + ('\n<tool_call>\n{"name": "look", "arguments": {"n": 1}}\n</tool_call>' if has_call else "")
        if self.chance(0.2):
            yield Call(list(history), tools, self.text(), role)
        call = Call(list(history), tools, text, role)
        call.is_refused_once, call.is_repeated = self.chance(0.1), self.chance(0.1)
        reply = yield call
        history = [*history, reply]
        if not has_call:
            return [*history, {"role": "user", "content": self.text()}]
        result = self.text()
        if depth < 2 and self.chance(0.4):
            result = yield from self.subagents(depth)
        if self.chance(0.3):
            result += yield from self.stray(history, tools)
        results = [
            {"role": "tool", "tool_call_id": each["id"], "content": result} for each in reply.get("tool_calls", ())
        ]
        return [*history, *results]

    def subagents(self, depth: int) -> Generator[Call, Message, str]:
        """One to three conversations of their own, turn by turn beside each other; what the last one says."""
        histories = [
            [
                {"role": "system", "content": f"You help at depth {depth}. " + self.text()},
                {"role": "user", "content": self.text()},
            ]
            for _ in range(self._random.randint(1, 3))
        ]
        tools = [tool("find", path={"type": "string"}), tool("look", n={"type": "integer"})]
        for _ in range(self._random.randint(1, 3)):
            for number, history in enumerate(histories):
                histories[number] = yield from self.turn(history, tools, Role.SUBAGENT, depth + 1)
        return next(str(each["content"]) for each in reversed(histories[-1]) if each["role"] == "assistant")

    def stray(self, history: list[Message], tools: list[Json]) -> Generator[Call, Message, str]:
        """A program that the agent runs finds the endpoint; what it prints is a part of the result of a tool."""
        own = [tool("other")] if self.chance(0.5) else []
        kind = self._random.choice(["bare", "own", "copy"])
        task = {"role": "user", "content": self.text()}
        messages = {
            "bare": [task],
            "own": [{"role": "system", "content": self.text()}, task],
            "copy": [history[0], task],
        }[kind]
        said = self.text()
        yield Call(messages, tools if kind == "copy" else own, said, Role.STRAY, headers=OTHER)
        return f"\n{said}" if self.chance(0.5) else ""

    def compact(
        self, system: list[Message], history: list[Message], tools: list[Json]
    ) -> Generator[Call, Message, list[Message]]:
        """Attempts at a summary, the last of which begins a new context; the history of that."""
        is_inline = self.chance(0.5)
        ask = {"role": "user", "content": "Summarize what happened so far, for somebody who continues from here."}
        if is_inline:
            messages, offered = [*history, ask], tools
        else:
            told = "\n".join(f"{each['role']}: {each.get('content') or ''}" for each in history)
            messages = [{"role": "system", "content": "You write summaries."}, {"role": "user", "content": told}]
            offered = []
        summary = f"First {self.text()}\nThen {self.text()}\nAt last {self.text()}"
        attempt = "inline" if is_inline else "apart"
        for _ in range(self._random.choice([0, 0, 1, 2])):
            yield Call(messages, offered, f"{self.text()}\n{self.text()}", Role.REJECTED, attempt=attempt)
        accepted = Call(messages, offered, summary, Role.COMPACTION, attempt=attempt)
        yield accepted
        kept = summary if self.chance(0.7) else summary.partition("\n")[2]  # some agents cut the beginning off
        fresh = [*system, {"role": "user", "content": f"The session so far: {kept}\nGo on."}]
        first = Call(fresh, tools, self.text(), Role.MAIN)
        accepted.used_by = first
        reply = yield first
        return [*fresh, reply, {"role": "user", "content": self.text()}]


def plan(seed: int) -> list[Call]:
    """The calls of the agent of that seed, as they come when replies are made up; the last one may be drained."""
    calls: list[Call] = []
    agent = RandomAgent(seed).run()
    with suppress(StopIteration):
        call = next(agent)
        while True:
            calls.append(call)
            call = agent.send(_reply(call, f"made_up_{len(calls)}"))
    chooser = random.Random(f"drain {seed}")
    if chooser.random() < 0.5:
        calls = calls[: chooser.randint(1, len(calls))]
        calls[-1].drained_after, calls[-1].is_refused_once = chooser.choice([0, 0, 1, 5]), False
    return calls


def _reply(call: Call, call_id: str) -> Message:
    said, separator, _ = call.text.partition("\n<tool_call>")
    reply: Json = {"role": "assistant", "content": said}
    if separator:
        reply["tool_calls"] = [
            {"id": call_id, "type": "function", "function": {"name": "look", "arguments": '{"n": 1}'}}
        ]
    return reply


def steps_of(calls: Sequence[Call]) -> list[ScriptStep]:
    """What an engine has to say to them."""
    steps: list[ScriptStep] = []
    for call in calls:
        if call.is_refused_once:
            steps.append(ScriptStep(text="no", fault=ScriptedFault.REJECT))
        hangs = None if call.drained_after is None else ScriptedFault.HANG
        steps.append(ScriptStep(text=call.text, fault=hangs, fault_after=call.drained_after or 0))
    return steps


async def play(client: Client[Any], session: Served, seed: int, calls: Sequence[Call]) -> None:
    """Play the agent of that seed, up to the last of `calls`, against a server whose engine says `steps_of(calls)`."""
    agent = RandomAgent(seed).run()
    reply: Message | None = None
    for planned in calls:
        call = next(agent) if reply is None else agent.send(reply)
        assert (call.text, call.role) == (planned.text, planned.role)
        fields: Json = {"tools": call.tools} if call.tools else {}
        headers = bearer(session.api_key) | call.headers
        ask = {"url": url_of(session), "json": {"model": "m", "messages": call.messages, **fields}, "headers": headers}
        if planned.drained_after is not None:
            waiting = asyncio.create_task(client.http.post(**ask))
            await eventually(partial(_has_sampled, client, planned.drained_after))
            assert (await client.http.post("/sessions/drain")).status_code == 200
            await client.engine.abort(None)
            assert (await waiting).status_code == 404
            return
        if call.is_refused_once:
            assert (await client.http.post(**ask)).status_code >= 400
        answer = await client.http.post(**ask)
        assert answer.status_code == 200, answer.text
        reply = answer.json()["choices"][0]["message"]
        if call.is_repeated:
            again = await client.http.post(**{**ask, "headers": {**headers, "x-stainless-retry-count": "1"}})
            assert again.json()["choices"][0]["message"] == reply


def _has_sampled(client: Client[Any], tokens: int) -> bool:
    return any(live.sampled >= tokens for live in client.engine.live)


def roles_of(calls: Sequence[Call]) -> list[Role]:
    """The role of each call that was made, as its maker knows it; a call without a token says nothing about others."""
    made = [call for call in calls if call.drained_after != 0]
    if len(made) == 1:
        return [Role.MAIN] * len(calls)  # of a single call nothing says that it is beside another one
    used = [call for call in made if call.used_by is not None and call.used_by in made]
    return [_role_of(call, made, used) for call in calls]


def _role_of(call: Call, made: Sequence[Call], used: Sequence[Call]) -> Role:
    siblings = [each for each in made if each.messages == call.messages and each.tools == call.tools]
    delivered = [each for each in siblings if each.drained_after is None]
    has_left = call is not (delivered or siblings or [call])[-1]
    if call.attempt:
        if call in used:
            return Role.COMPACTION
        if any(each.attempt == call.attempt for each in used):
            return Role.REJECTED
        return Role.SIDE if call.attempt == "apart" else Role.RESAMPLE if has_left else Role.MAIN
    return Role.RESAMPLE if has_left and call.role in (Role.MAIN, Role.SUBAGENT) else call.role
