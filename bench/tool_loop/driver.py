"""The clients of the tool loop: whole conversations, as an SDK would have them, streamed or not."""

import json
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import aiohttp

from bench.tool_loop.words import TOOLS
from tests.dialects.speakers import SPEAKERS

Note = Callable[[int, float], None]
"""Is told each turn, from 0, and the seconds in which it was answered."""


async def converse(
    client: aiohttp.ClientSession,
    url: str,
    turns: int,
    texts: Sequence[str],
    note: Note,
    *,
    streamed: bool = False,
    inherits: str = "",
) -> str:
    """One session of `turns` turns, perhaps with the record of an earlier one; returns where its record is."""
    config = {"inherits": {"session_id": inherits}} if inherits else {}
    async with client.post(f"{url}/sessions", json=config) as response:
        session_url = base_url_of(url, json.loads(await response.read()))
    asked = {"model": "m", "stream": streamed, "tools": TOOLS, "messages": []}
    head = json.dumps(asked, separators=(",", ":")).encode().removesuffix(b"]}")
    history = bytearray(_dump({"role": "system", "content": "You search notes."}))
    new: list[object] = [{"role": "user", "content": texts[0]}]
    for turn in range(turns):
        for message in new:  # as an SDK does: what it got is parsed, and written again
            history += b"," + _dump(message)
        body = head + history + b"]}"
        began = perf_counter()
        async with client.post(
            f"{session_url}/v1/chat/completions", data=body, headers={"content-type": "application/json"}
        ) as response:
            answer = await response.read()
        note(turn, perf_counter() - began)
        if response.status != 200:
            raise SystemExit(f"turn {turn} was answered {response.status}: {answer.decode()[:300]}")
        reply = _message_in(answer, streamed=streamed)
        if len(reply["tool_calls"]) != 1:
            raise SystemExit(f"turn {turn} was answered without the call: {answer.decode()[:300]}")
        result = {"role": "tool", "tool_call_id": reply["tool_calls"][0]["id"], "content": texts[turn % len(texts)]}
        new = [reply, result]
    return session_url


def base_url_of(url: str, created: dict[str, Any]) -> str:
    """Where a session's model calls go: the `base_url` of a server that says one, else below its id."""
    base = str(created.get("base_url") or "").removesuffix("/v1")
    if base.startswith("http"):
        return base
    return f"{url}/sessions/{created['session_id']}" if created.get("session_id") else url


async def check(client: aiohttp.ClientSession, session_url: str, turns: int) -> None:
    """Every turn of a session of ours was recorded, on one branch. Raises `SystemExit`."""
    async with client.get(session_url) as response:
        record = json.loads(await response.read())
    parents = [turn["parent"] for turn in record["turns"]]
    if parents != [None, *range(turns - 1)]:
        raise SystemExit(f"expected {turns} turns on one branch, got the parents {parents}")


def _message_in(answer: bytes, *, streamed: bool) -> dict[str, Any]:
    if streamed:
        whole = SPEAKERS[0].gather(
            [json.loads(line[6:]) for line in answer.split(b"\n") if line.startswith(b"data: {")]
        )
    else:
        whole = json.loads(answer)
    message = whole["choices"][0]["message"]
    calls = message.get("tool_calls") or []
    return {"role": "assistant", "content": message.get("content") or None, "tool_calls": calls}


def _dump(message: object) -> bytes:
    return json.dumps(message, ensure_ascii=False, separators=(",", ":")).encode()
