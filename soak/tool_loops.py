"""Tool loops of known words, for aborts of sessions that have turns behind them, and what somebody else reads of them.

Every session brings a script, so a real engine samples it token by token, with its own scheduler, cache and logprobs.
Half of the scripts have an inner turn that a limit ends and that the agent goes on from: the merge rule drops what
follows. The steps behind the loop are long: an abort meets them in flight.
"""

import asyncio
import json
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from harness.rollouts.agents.task import Agent, FunctionAgent, ProgramAgent
from harness.samples.rollout import Rollout
from harness.tokens.chat_tokenizer import ChatTokenizer
from harness.types import Json
from tests.builders import user
from tests.session_servers.store_file import StoredSession, StoredTurn, ledger_of, read_sessions

CALL = '<tool_call>{"name":"add"}</tool_call>'
TOOLS: list[Json] = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CUT = "I was about to use"
LONG = "Let me think about that. " * 16
_LONG_STEPS = 12  # so that sessions that are early still have some when the last one has had its turns
_PROGRAM = """
import json, os, signal, time, urllib.error, urllib.request
signal.signal(signal.SIGTERM, signal.SIG_IGN)
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
tools, messages = json.loads(os.environ["TOOLS"]), [{"role": "user", "content": "Add."}]
while True:
    body = json.dumps({"model": "m", "messages": messages, "tools": tools}).encode()
    try:
        asked = urllib.request.Request(url, body, {"content-type": "application/json"})
        said = json.load(urllib.request.urlopen(asked))["choices"][0]["message"]
    except urllib.error.HTTPError:
        time.sleep(0.05)
        continue
    answers = [{"role": "tool", "tool_call_id": call["id"], "content": "42"} for call in said.get("tool_calls") or ()]
    messages += [said, *(answers or [{"role": "user", "content": "Use the tool."}])]
"""
"""Goes on whatever it is told, and ignores SIGTERM."""


@dataclass(frozen=True)
class ToolLoops:
    """Sessions of `turns` turns and more, and the agents that play them."""

    turns: int
    chat_tokenizer: ChatTokenizer
    store: Path
    """The file of the sessions' store."""

    def session(self, chance: random.Random) -> Json:
        steps: list[Json] = [{"text": CALL}] * self.turns
        if chance.random() < 0.5:  # an inner turn: neither the first nor the last of the loop
            steps[chance.randrange(1, self.turns - 1)] = {"text": CUT, "finish": "length"}
        return {"script": {"steps": [*steps, *[{"text": LONG}] * _LONG_STEPS]}, "after_incomplete": "serve"}

    def agents(self, http: aiohttp.ClientSession) -> list[FunctionAgent]:
        """One of each behavior, over one connection pool."""
        return [FunctionAgent(name, self._loop, {"http": http, "then": name}) for name in ("obey", "ignore", "think")]

    def program(self) -> Agent:
        return ProgramAgent("stubborn", (sys.executable, "-S", "-c", _PROGRAM), {"TOOLS": json.dumps(TOOLS)})

    async def _loop(self, base_url: str, prompt: str, http: aiohttp.ClientSession, then: str, **_: Any) -> Json:
        """Use the tool until refused; `think` is in it for ever once it has had its turns, `ignore` asks again."""
        messages: list[Any] = [user(prompt)]
        answered = 0
        while True:
            body = {"model": "m", "messages": messages, "tools": TOOLS}
            async with http.post(f"{base_url}/chat/completions", json=body) as response:
                answer = await response.json()
            if response.status == 200:
                said = answer["choices"][0]["message"]
                answers = [_result(call) for call in said.get("tool_calls") or ()]
                messages += [said, *(answers or [user("Use the tool.")])]
                answered += 1
            elif then == "obey":
                return {"answered": answered}
            if then == "think" and answered == self.turns:
                await asyncio.sleep(3600)
            if response.status != 200:
                await asyncio.sleep(0.02)

    def judge(self, rollouts: Sequence[Rollout]) -> "Reading":
        """`rollouts` as a reader of the file sees them, who takes nothing from our code but the words of the script."""
        ids = [rollout.session_id for rollout in rollouts if rollout.session_id is not None]
        stored = read_sessions(self.store, ids)
        reading = Reading([], 0, 0)
        for rollout in rollouts:
            session = stored.get(rollout.session_id or "")
            if session is None:
                reading.faults.append(f"session {rollout.session_id} is not in the file")
                continue
            reading.faults.extend(f"session {rollout.session_id}: {fault}" for fault in self._faults(rollout, session))
            trailing = count_trailing(session)
            reading.cut_sessions += bool(trailing)
            reading.cut_turns += trailing
        return reading

    def _faults(self, rollout: Rollout, session: StoredSession) -> Iterator[str]:
        ledger = rollout.session["ledger"]
        if ledger != ledger_of(session):
            yield f"its ledger is {ledger}, another reader counts {ledger_of(session)}"
        if ledger["trained"]:
            yield f"{ledger['trained']} tokens of a script are trained"
        if len(session.turns) < self.turns:
            yield f"it has had {len(session.turns)} turns of {self.turns}"
        dropped = [sample.metadata.get("dropped_trailing_turns", 0) for sample in rollout.samples]
        if dropped != [count_trailing(session)]:
            yield f"dropped_trailing_turns of its samples: {dropped}; the file has {count_trailing(session)} such turns"
        for turn in rollout.session["turns"]:
            calls_tool = turn["status"] == "completed" and turn["script_step"] < self.turns
            if not self._says(session.turns[turn["turn"]], turn["script_step"]):
                yield f"turn {turn['turn']} does not say its step"
            if calls_tool != (turn["end"] == "tool_calls"):
                yield f"turn {turn['turn']} of step {turn['script_step']} ended as {turn['end']}"

    def _says(self, turn: StoredTurn, step: int) -> bool:
        """Whether a turn says the step of its script, all of it where nothing cut it short, and is marked as forced."""
        encode, end = self.chat_tokenizer.tokenizer.encode, self.chat_tokenizer.end_of_turn_id
        of_the_loop = (encode(CUT), [*encode(CALL), end])
        sayings = ([*encode(LONG), end],) if step >= self.turns else of_the_loop
        said, is_whole = turn.output, turn.status in ("completed", "truncated")
        return turn.forced == len(said) and any(
            said == ids if is_whole else said == ids[: len(said)] for ids in sayings
        )


@dataclass
class Reading:
    faults: list[str]
    cut_sessions: int
    cut_turns: int
    """Behind an incomplete one, on the branches that samples are made of."""


def count_trailing(session: StoredSession) -> int:
    """Turns of the branch of the last turn behind its first incomplete one."""
    usable = {index: turn for index, turn in session.turns.items() if turn.is_usable}
    branch: list[StoredTurn] = []
    index = max(usable, default=None)
    while index is not None:
        branch.insert(0, usable[index])
        index = usable[index].parent
    end = next((number for number, turn in enumerate(branch, start=1) if turn.status != "completed"), len(branch))
    return len(branch) - end


def _result(call: Any) -> dict[str, str]:
    return {"role": "tool", "tool_call_id": call["id"], "content": "42"}
