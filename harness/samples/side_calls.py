"""Which turns of a session were asked for beside the conversation: titles, summaries, background calls.

A turn is a side call when its request offered no tools although others of the session did, or when a rule of the
session's owner names a text in what the client asked with it (`notes.side_call`): in its system, developer and user
messages. What a tool has read, or a reply says, takes nothing out of training. Whatever extends a side call is one.
Nothing here knows agents: a profile states its agent's rules.
"""

from collections.abc import Sequence
from typing import Any

from harness.types import Message, Turn

TOOLS_NOTE = "tools"
"""Of a turn: how many tools its request offered."""
RULE_NOTE = "side_call"
"""Of a turn: the rule that its messages met."""

_ASKING = frozenset({"system", "developer", "user"})


def call_notes(messages: Sequence[Message], tool_count: int, rules: Sequence[str]) -> dict[str, Any]:
    """What the record keeps of a request that brought `messages`, for telling later whether it was a side call."""
    notes: dict[str, Any] = {TOOLS_NOTE: tool_count}
    asked = (message for message in messages if message["role"] in _ASKING)
    texts = [message["content"] for message in asked if isinstance(message.get("content"), str)]
    met = next((rule for rule in rules if any(rule in text for text in texts)), None)
    return notes if met is None else notes | {RULE_NOTE: met}


def find_side_calls(turns: Sequence[Turn]) -> frozenset[int]:
    """The indices of the side calls among `turns`, which are in order of admission, parents first."""
    others_have_tools = any(turn.notes.get(TOOLS_NOTE, 0) > 0 for turn in turns)
    found: set[int] = set()
    for turn in turns:
        has_none = others_have_tools and turn.notes.get(TOOLS_NOTE) == 0
        if has_none or RULE_NOTE in turn.notes or turn.parent in found:
            found.add(turn.index)
    return frozenset(found)
