"""Edits of a fork: messages of the forked turn that the model reads with another text than its agent sends.

The agent runs again and sends its conversation as it knows it. A call with the recorded conversation up to an edited
message is read with the edit, so tokens and record have what the model saw.
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
    """Return `inherits` with the place of its edits, after the edits of `previous`. Raise `MalformedRequest`."""
    earlier = () if previous.config.inherits is None else previous.config.inherits.edits
    if not inherits.edits:
        return replace(inherits, edits=earlier)
    if inherits.before is None:
        raise _refusal("expected none without `before`, the turn to resample")
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
    form = previous.normal_form
    key = next_key(branch[-1].key, branch[-1].reply, form) if branch else bytes.fromhex(turn.notes.toolset)
    asked = {edit.message: edit for edit in inherits.edits}
    placed = []
    for number, message in enumerate(turn.messages_delta, first):
        place = next_key(key, message, form)
        if number in asked:
            placed.append(replace(asked[number], place=place))
            place = next_key(key, {**message, "content": asked[number].content}, form)
        key = place
    return replace(inherits, edits=(*earlier, *placed))


def apply_edits(
    edits: Sequence[Edit], messages: Sequence[Message], prefixes: Sequence[Prefix], form: NormalForm
) -> tuple[Sequence[Message], Sequence[Prefix]]:
    """Return messages and prefixes of a call with those `edits` from whose place it continues."""
    for edit in sorted(edits, key=lambda edit: edit.message):
        if edit.message >= len(messages) or prefixes[edit.message + 1].key != edit.place:
            continue
        known = list(prefixes[: edit.message + 1])
        sent = {**messages[edit.message], "content": edit.content}
        messages = [*messages[: edit.message], sent, *messages[edit.message + 1 :]]
        for message in messages[edit.message :]:
            known.append(known[-1].extend(message, form, is_first=len(known) == 1))
        prefixes = known
    return messages, prefixes


def _refusal(expected: str) -> MalformedRequest:
    return MalformedRequest(f"inherits.edits: {expected}", param="inherits.edits")
