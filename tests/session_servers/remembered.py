"""What the clients of a session remember of it, and whether its file agrees: for tests of any order of events."""

from dataclasses import dataclass, field
from typing import Any

from tests.session_servers.store_file import StoredSession, answer_key, said, stored_key

Key = tuple[Any, ...]
"""By what an answer is known again in the file."""


@dataclass
class Remembered:
    """A session as its clients know it from the answers they got."""

    session_id: str
    serves_incomplete: bool
    answers: set[Key] = field(default_factory=set)
    extensions: set[tuple[Key, Key]] = field(default_factory=set)
    """Pairs of answers, of which the second continued the first."""
    is_closed: bool = False

    def hear(self, answer: dict[str, Any], continues: Key | None, result: str) -> tuple[list[dict[str, Any]], Key]:
        """Remember an answer, which continued another one or none; returns how the history continues, and its key.

        Every tool that it calls says `result`.
        """
        choice = answer["choices"][0]
        assert choice["finish_reason"] != "abort" or self.serves_incomplete, "an aborted turn was served (I2)"
        message, key = choice["message"], answer_key(answer)
        self.answers.add(key)
        if continues is not None:
            self.extensions.add((continues, key))
        calls = message.get("tool_calls") or []
        return [message, *({"role": "tool", "tool_call_id": call["id"], "content": result} for call in calls)], key

    def must_agree(self, session: StoredSession) -> None:
        """Answers are in the file, below what they continue (I9); no two turns share a seed; closed is closed."""
        stored = {index: stored_key(turn) for index, turn in session.turns.items() if turn.is_usable}
        parents = {index: session.turns[index].parent for index in stored}
        # One turn may answer twice: to the server that came after, an answer that nobody confirmed is undelivered.
        pairs = {(said(None if at is None else stored.get(at)), said(stored[index])) for index, at in parents.items()}
        seeds = [turn.seed for turn in session.turns.values() if turn.seed is not None]
        assert self.answers <= set(stored.values())
        assert {(said(before), said(after)) for before, after in self.extensions} <= pairs
        assert len(set(seeds)) == len(seeds)
        assert (session.phase == "open") == (not self.is_closed)
