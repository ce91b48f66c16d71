"""Matching functions as users write them, reached by `custom_matching:NAME`."""

from typing import Any


def role_only(message: dict[str, Any]) -> dict[str, Any]:
    """Two messages of one role are the same."""
    return {"role": message["role"]}


def calls_as_text(message: dict[str, Any]) -> dict[str, Any]:
    """Something that is no list of calls."""
    return {"role": message["role"], "content": 1, "tool_calls": str(message.get("tool_calls"))}


def half_calls(message: dict[str, Any]) -> dict[str, Any]:
    """A list of what is no call."""
    halves = ["text", {"function": None}, {"id": 1}, message.get("tool_calls")]
    return {"role": message["role"], "reasoning_content": ["hm"], "tool_calls": halves}


def broken(message: dict[str, Any]) -> dict[str, Any]:
    """Fails on every message."""
    return {"never": message["there"]}
