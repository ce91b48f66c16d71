"""The clients of the tool loop: whole conversations, as an SDK would have them, streamed or not."""

import json
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import aiohttp
import msgspec

from bench.tool_loop.words import TOOLS

Note = Callable[[int, float], None]
"""Is told each turn, from 0, and the seconds in which it was answered."""


class _Message(msgspec.Struct):
    role: str
    content: str | None = None
    tool_calls: list[dict[str, Any]] = []


class _Choice(msgspec.Struct):
    message: _Message


class _Completion(msgspec.Struct):
    choices: list[_Choice]


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
        reply = _joined(answer) if streamed else msgspec.json.decode(answer, type=_Completion).choices[0].message
        if len(reply.tool_calls) != 1:
            raise SystemExit(f"turn {turn} was answered without the call: {answer.decode()[:300]}")
        result = {"role": "tool", "tool_call_id": reply.tool_calls[0]["id"], "content": texts[turn % len(texts)]}
        new = [msgspec.to_builtins(reply), result]
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


def _joined(stream: bytes) -> _Message:
    """The message whose deltas are in `stream`; of its calls, the parts of each are joined."""
    content: list[str] = []
    calls: dict[int, dict[str, Any]] = {}
    for line in stream.split(b"\n"):
        if not line.startswith(b"data: {"):
            continue
        for choice in json.loads(line[6:])["choices"]:
            delta = choice["delta"]
            content.append(delta.get("content") or "")
            for part in delta.get("tool_calls") or ():
                function = part.get("function", {})
                empty = {"id": part.get("id"), "type": "function", "function": {"name": "", "arguments": ""}}
                call = calls.setdefault(part["index"], empty)
                call["function"]["name"] += function.get("name") or ""
                call["function"]["arguments"] += function.get("arguments") or ""
    return _Message("assistant", "".join(content) or None, [calls[index] for index in sorted(calls)])


def _dump(message: object) -> bytes:
    return json.dumps(message, ensure_ascii=False, separators=(",", ":")).encode()
