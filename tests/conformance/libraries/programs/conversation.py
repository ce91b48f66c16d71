"""The conversation that every library plays in several ways: two questions to a model with three tools.

Standard library only, but for pydantic where a library reads the tools' signatures: it is imported in environments that
differ.
"""

import asyncio
import inspect
import json
import os
import traceback
from collections.abc import Awaitable, Callable
from typing import NamedTuple

QUESTIONS = ("Please note what the two sums are.", "Is it noted?")
MODEL = "scripted"
SCHEMAS = {
    "look": {"type": "object", "properties": {}},
    "add": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}, "required": ["a", "b"]},
    "note": {
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "place": {
                "type": "object",
                "properties": {
                    "name": {"type": "string"},
                    "at": {"type": "array", "items": {"type": "number"}},
                    "depth": {"type": "integer"},
                },
                "required": ["name", "at", "depth"],
            },
        },
        "required": ["text", "place"],
    },
}
DESCRIPTIONS = {"look": "Read all notes.", "add": "Add two numbers.", "note": "Write a note at a place."}


def look() -> str:
    """Read all notes."""
    return "There is a note."


def add(a: float, b: float) -> float:
    """Add two numbers."""
    return a + b


def call(name: str, arguments: str | dict[str, object]) -> str:
    """The result of a tool for libraries that leave the calling to the program."""
    values = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
    match name:
        case "look":
            return look()
        case "add":
            return str(add(**values))
    return f"Noted at {values['place']['name']}."


class Way(NamedTuple):
    """One conversation of a program."""

    dialect: str
    streams: bool


def play(converse: Callable[[Way], list[str] | Awaitable[list[str]]]) -> None:
    """Play a conversation with each session of `CONVERSATIONS`; print its answers, or the error that ended it.

    `converse` is called while the environment names the session.
    """
    for conversation in json.loads(os.environ["CONVERSATIONS"]):
        os.environ.update(conversation["env"])
        try:
            answers = converse(Way(conversation["dialect"], conversation["streams"]))
            told = asyncio.run(answers) if inspect.iscoroutine(answers) else answers
        except Exception:  # noqa: BLE001  # the next conversation is played all the same
            told = [traceback.format_exc()]
        print(f"\n{json.dumps(told)}", flush=True)  # some libraries leave their words on the line
