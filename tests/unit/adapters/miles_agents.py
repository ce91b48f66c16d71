"""Agents by miles' contract: the same file runs under miles' own generate function."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import httpx

from harness.adapters.miles import abort

__all__ = ["abort", "crash", "keeps", "run", "run_branches", "run_branches_unscored", "run_unscored"]

ENDLESS = 9
"""Groups from here on never have enough."""
LATE = 5
"""Groups from here on, up to those, wait for the second update."""


@dataclass
class Play:
    """How far the agents of a test have come, and what they wait for."""

    updates: dict[int, asyncio.Event] = field(default_factory=lambda: {1: asyncio.Event(), 2: asyncio.Event()})
    first: int = 0
    """Agents that have their first answer."""
    early: int = 0
    """Agents that continued after the first update, and have ended."""
    statuses: dict[int, list[int]] = field(default_factory=dict)
    """By index of the sample: of all answers, in their order."""
    given: list[dict[str, Any]] = field(default_factory=list)
    """What the agents were called with."""


play = Play()


async def run(base_url, prompt, request_kwargs, metadata):
    """Two turns, with a wait for an update of the weights in between; or turns until it gets no more."""
    play.given.append({"base_url": base_url, "prompt": prompt, "request_kwargs": request_kwargs, "metadata": metadata})
    messages, statuses = list(prompt), play.statuses.setdefault(metadata["index"], [])
    headers = {"authorization": f"Bearer {metadata.get('session_api_key', 'none')}"}
    async with httpx.AsyncClient(base_url=base_url, headers=headers, trust_env=False, timeout=60) as client:

        async def ask() -> bool:
            body = {"model": "policy", "messages": messages, **request_kwargs}
            answer = await client.post("/v1/chat/completions", json=body)
            statuses.append(answer.status_code)
            if answer.status_code == 200:
                messages.extend([answer.json()["choices"][0]["message"], {"role": "user", "content": "Go on."}])
            return answer.status_code == 200

        await ask()
        play.first += 1
        group = metadata["group"]
        if group >= ENDLESS:
            while await ask():
                pass
            await ask()  # a client that did not understand
            return None
        await play.updates[1 if group < LATE else 2].wait()
        await ask()
        play.early += group < LATE
    return {"reward": 1.0 if group == 0 else float(metadata["index"] % 2), "agent_metrics": {"total_tool_time": 0.5}}


def keeps(args, group) -> bool:
    """The filter: rewards differ."""
    return len({sample.reward for member in group for sample in (member if isinstance(member, list) else [member])}) > 1


async def rate(args, sample):
    """A reward model for one sample."""
    return sample.metadata["index"] / 2


async def run_branches(base_url, prompt, request_kwargs, metadata):
    """Two conversations with the same system prompt; or more of the second until it gets no more."""
    headers = {"authorization": f"Bearer {metadata.get('session_api_key', 'none')}"}
    async with httpx.AsyncClient(base_url=base_url, headers=headers, trust_env=False, timeout=60) as client:
        messages = []
        for question in ["First.", "Second."] + ["Go on."] * (100 if metadata["group"] >= ENDLESS else 0):
            if question != "Go on.":
                messages = list(prompt)
            messages.append({"role": "user", "content": question})
            answer = await client.post("/v1/chat/completions", json={"messages": messages, **request_kwargs})
            if answer.status_code != 200:
                return None
            messages.append(answer.json()["choices"][0]["message"])
    return {"reward": float(metadata["index"] % 2)}


async def run_branches_unscored(base_url, prompt, request_kwargs, metadata):
    """The same, and what it is worth is left to a reward model."""
    await run_branches(base_url, prompt, request_kwargs, metadata)


async def run_unscored(base_url, prompt, request_kwargs, metadata):
    """The same, and what it is worth is left to a reward model."""
    await run(base_url, prompt, request_kwargs, metadata)


async def crash(base_url, prompt, request_kwargs, metadata):
    """An agent with a mistake."""
    raise RuntimeError("no such tool")
