"""Families of sessions: lives and forks below the session that they inherit from, and how they left its record."""

from collections.abc import Iterator, Sequence

from harness.sessions.inheritance import InheritanceEnd
from harness.types import Json
from harness.viewer.run_view import SessionLine

_ENDS = {
    InheritanceEnd.RECORD: "the record has no further answer",
    InheritanceEnd.FORK: "resampled",
    InheritanceEnd.TOOLS: "other tools or template variables",
    InheritanceEnd.SAMPLING: "other sampling fields",
    InheritanceEnd.AGENT: "the agent ended without asking for the rest",
}


def walk_families(lines: Sequence[SessionLine]) -> Iterator[tuple[SessionLine, int]]:
    """Yield the sessions that inherit or are inherited from, each below its earlier session, with its depth."""
    known = {line.session_id for line in lines}
    heirs: dict[str | None, list[SessionLine]] = {}
    for line in lines:
        heirs.setdefault(line.inherits if line.inherits in known else None, []).append(line)
    waiting = [(line, 0) for line in reversed(heirs.pop(None, [])) if line.session_id in heirs or line.inherits]
    while waiting:
        line, depth = waiting.pop()
        yield line, depth
        waiting += [(heir, depth + 1) for heir in reversed(heirs.pop(line.session_id, []))]


def inheritance_facts(inherits: Json | None) -> Iterator[tuple[str, str]]:
    """Yield name and words of what a session inherits, its edits, and how it left the record."""
    if inherits is None:
        return
    kin = "all" if inherits["before"] is None else f"fork at turn {inherits['before']}"
    turns = f"{inherits['turns']} turns, {inherits['asked_again']} asked again"
    yield "inherits", f"from {inherits['session_id']}: {kin}; {turns}"
    for edit in inherits["edits"]:
        yield "edited", f"messages[{edit['message']}]: {edit['content']}"
    if end := end_words(inherits):
        yield "inherited until", end


def end_words(inherits: Json) -> str:
    """Return where and why a session left its record, in words; empty if it has not."""
    because, difference = inherits["because"], inherits["difference"]
    if because is None:
        return ""
    why = _ENDS.get(because, str(because))
    if difference:
        field = difference["field"]
        place = field if field in ("tools", "sampling") else f"messages[{difference['message']}].{field}"
        why = f"{place} is {difference['sent']!r}, recorded {difference['recorded']!r}"
    turn = inherits["ended_at"]
    return why if turn is None else f"turn {turn}: {why}"
