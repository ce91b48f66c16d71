"""Edits of a fork: messages of the forked turn that the model reads with another text than its agent sends.

The agent runs again and sends its conversation as it knows it. Every call that goes on from the fork's place is read
with the edits, so tokens and record have what the model saw.
"""

from collections.abc import Sequence
from dataclasses import replace

from harness.errors import MalformedRequest
from harness.sessions.session import Session
from harness.sessions.session_config import Edit, Inheritance
from harness.tokens.history import Prefix
from harness.tokens.matching import NormalForm, next_key
from harness.types import Message

_EDITABLE = ("tool", "user")


def place_edits(previous: Session, inherits: Inheritance) -> Inheritance:
    """Return `inherits` with the place of its edits, after those of `previous`. Raise `MalformedRequest`."""
    earlier = () if previous.config.inherits is None else previous.config.inherits.edits
    if not inherits.edits:
        return replace(inherits, edits=earlier)
    if inherits.before is None:
        raise _refusal("expected none without `before`, the turn that is sampled anew")
    turn = previous.turn(inherits.before)
    branch = previous.branch(turn.parent)
    first = sum(len(each.messages_delta) + 1 for each in branch)
    roles = {first + number: message["role"] for number, message in enumerate(turn.messages_delta)}
    offered = {number: role for number, role in roles.items() if role in _EDITABLE}
    for edit in inherits.edits:
        if edit.message not in offered:
            listed = ", ".join(f"{number} ({role})" for number, role in offered.items()) or "it adds none"
            raise _refusal(
                f"expected a tool result or user message that turn {turn.index} adds: {listed}; got message"
                f" {edit.message}"
            )
    if branch:
        place = next_key(branch[-1].key, branch[-1].reply, previous.normal_form)
    else:
        place = bytes.fromhex(turn.notes.toolset)
    return replace(inherits, edits=(*earlier, *(replace(edit, place=place) for edit in inherits.edits)))


def apply_edits(
    edits: Sequence[Edit], messages: Sequence[Message], prefixes: Sequence[Prefix], form: NormalForm
) -> tuple[Sequence[Message], Sequence[Prefix]]:
    """Return messages and prefixes of a call with those `edits` from whose place it goes on."""
    for edit in sorted(edits, key=lambda edit: edit.message):
        known = list(prefixes[: edit.message + 1])
        if edit.message >= len(messages) or all(prefix.key != edit.place for prefix in known):
            continue
        sent = messages[edit.message]
        if sent["role"] in _EDITABLE:
            sent = {**sent, "content": edit.content}
        messages = [*messages[: edit.message], sent, *messages[edit.message + 1 :]]
        for message in messages[edit.message :]:
            known.append(known[-1].extend(message, form, is_first=len(known) == 1))
        prefixes = known
    return messages, prefixes


def _refusal(expected: str) -> MalformedRequest:
    return MalformedRequest(f"inherits.edits: {expected}", param="inherits.edits")
