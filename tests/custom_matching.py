"""Matching functions as users write them, reached by `custom_matching:NAME`."""

from typing import Any


def role_only(message: dict[str, Any]) -> dict[str, Any]:
    """Two messages of one role are the same."""
    return {"role": message["role"]}


def broken(message: dict[str, Any]) -> dict[str, Any]:
    """Fails on every message."""
    return {"never": message["there"]}
