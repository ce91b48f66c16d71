"""Is a teacher's work hidden behind the agents' tools? Scripted engines, with pauses in the place of work.

    python -m bench.teachers --sessions 8 --score-ms 40 --tool-ms 60

Plays the same rollouts without and with a teacher, and counts the sessions that it has scored when their last tool
ends. Turns are timed at the client. Exits 1 if fewer than 95 % are scored.
"""

import argparse
import asyncio
import sys
from statistics import median, quantiles
from time import perf_counter
from typing import Any, NamedTuple

import harness
from harness.sessions.teaching import count_untaught
from harness.tokens.tokenizer import Tokenizer
from harness.types import PromptLogprobs, TokenIds
from tests.builders import user
from tests.session_servers.served import serving_with

SHARE = 0.95


class Slow(harness.ScriptedEngine):
    def __init__(self, tokenizer: Tokenizer, score_s: float) -> None:
        super().__init__(tokenizer)
        self._score_s = score_s

    async def score(self, input_ids: TokenIds, **options: Any) -> PromptLogprobs:
        await asyncio.sleep(self._score_s)
        return await super().score(input_ids, **options)


class Played(NamedTuple):
    scored: int
    turns_ms: list[float]


async def play(given: argparse.Namespace, *, is_taught: bool) -> Played:
    """The sessions that were scored at their end, and the milliseconds of each turn."""
    chat_tokenizer = harness.open_chat_tokenizer(harness.resolve_model("smollm2-135m-instruct"))
    teacher = harness.TeacherSpec("slow", lambda: Slow(chat_tokenizer.tokenizer, given.score_ms / 1000))
    settings = harness.ServerSettings(teachers=(teacher,) if is_taught else ())
    engine = harness.ScriptedEngine(chat_tokenizer.tokenizer)
    turns_ms: list[float] = []
    async with serving_with(engine, settings=settings, chat_tokenizer=chat_tokenizer) as client:

        async def roll_out() -> bool:
            created, messages = await client.create(), list[Any]()
            for _ in range(given.turns):
                messages.append(user("Go on."))
                began = perf_counter()
                messages.append(await client.say(created, messages))
                turns_ms.append((perf_counter() - began) * 1000)
                await asyncio.sleep(given.tool_ms / 1000)
            session = client.server.sessions.in_memory(created.session_id)
            return session is not None and not count_untaught(session, "slow")

        ended = await asyncio.gather(*(roll_out() for _ in range(given.sessions)))
    return Played(sum(ended), turns_ms)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=8, help="At a time.")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--score-ms", type=float, default=40.0)
    parser.add_argument("--tool-ms", type=float, default=60.0)
    given = parser.parse_args()
    for is_taught in (False, True, False, True):
        played = asyncio.run(play(given, is_taught=is_taught))
        spread = f"turns {median(played.turns_ms):.1f} ms, p90 {quantiles(played.turns_ms, n=10)[-1]:.1f} ms"
        print("with a teacher:" if is_taught else "without:", spread, end="")
        print(f", {played.scored} of {given.sessions} sessions scored at their end" if is_taught else "", flush=True)
    sys.exit(played.scored < SHARE * given.sessions)


if __name__ == "__main__":
    main()
