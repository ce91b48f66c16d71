"""A run or store as a reader sees it: its end, a line for each session, and families of sessions.

A family is the lives and forks below the session that they inherit from. Damaged parts become sentences, the rest is
shown: files may be half written, of another version, or crafted, as JSON that is nested thousands deep.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from shlex import quote
from typing import Self

from harness.errors import HarnessError, RunError
from harness.samples.rollout import ENDED_WELL
from harness.server.store.rows import StoredLine
from harness.sessions.hold_times import HoldTime
from harness.sessions.inheritance import InheritanceEnd
from harness.sessions.lifecycle import CloseReason, Phase
from harness.suite.record.rollout_table import RolloutRecord
from harness.types import Json

DAMAGE = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError, OSError)


@contextmanager
def say_missing(what: str, missing: list[str]) -> Iterator[None]:
    """Turn an error of the block into a sentence about `what` in `missing`."""
    try:
        yield
    except HarnessError as error:
        missing.append(f"{what}: {error.message}")
    except DAMAGE as error:
        missing.append(f"{what}: it is damaged ({type(error).__name__}: {error})")


def require_finite(number: float) -> float:
    """Return `number` from a file. Raises `ValueError` or `TypeError` if it is not finite."""
    if not math.isfinite(number):
        raise ValueError(f"{number} is not a time")
    return number


_ENDS = {
    InheritanceEnd.RECORD: "the record has no further answer",
    InheritanceEnd.FORK: "resampled",
    InheritanceEnd.TOOLS: "other tools or template variables",
    InheritanceEnd.SAMPLING: "other sampling fields",
    InheritanceEnd.AGENT: "the agent ended without asking for the rest",
}

SHORT_ID = 8
"""Hex digits of session ids in lists. A shorter decimal name is a rollout's number."""

_WHY: Mapping[str, str] = {
    CloseReason.DELETED: "its owner deleted it without an outcome",
    CloseReason.DRAINED: "the server was drained while it was created",
    CloseReason.IDLE: "it was unused for longer than the server keeps sessions",
    CloseReason.TAKEN_OVER: "another session continued its turns",
    CloseReason.DAMAGED: "it could not be read back",
    Phase.CLOSED: "it is closed, and the store is too old to record why",
    Phase.CLOSING: "it was drained, and is not closed",
    Phase.ENDED: "its agent has ended, and it is not closed",
}


@dataclass(frozen=True, slots=True)
class SessionLine:
    """A session, and its rollout if it has one."""

    session_id: str | None
    """None for a rollout without a session."""
    number: int | None = None
    scenario: str | None = None
    group: int | None = None
    """Position of the prompt in the run."""
    seed: int | None = None
    """Equal for the same prompt and place, in every run of a scenario with one seed."""
    outcome: str | None = None
    """None if the rollout continues, was killed, or has no reported end."""
    state: str | None = None
    """Phase, or reason for closing, of a session without an outcome."""
    cause: str | None = None
    detail: str = ""
    reward: float | None = None
    score: Json = field(default_factory=dict)
    """The check's `reward`, `figures` by name, `reason` and further `details`, without those that it left out."""
    score_error: str | None = None
    turns: int | None = None
    sampled: int | None = None
    """Sampled tokens, including discarded ones."""
    agent_log: Path | None = None
    refusals: Mapping[str, int] | None = None
    """Error answers to model calls, by code; None if not recorded."""
    last_words: str | None = None
    """Last log line of an agent that did not end well."""
    log_end: Sequence[str] = ()
    """Last lines of the agent's log."""
    agent_result: Json | None = None
    inherits: str | None = None
    """Earlier session with whose record it began."""
    forked_at: int | None = None
    """Turn of that session that this one resampled; None for a further life."""

    @classmethod
    def of(cls, rollout: RolloutRecord, agent_log: Path | None, log_end: Sequence[str]) -> Self:
        return cls(
            session_id=rollout.session_id,
            number=rollout.number,
            scenario=rollout.scenario,
            group=rollout.group,
            seed=rollout.seed,
            outcome=str(rollout.outcome),
            cause=None if rollout.cause is None else str(rollout.cause),
            detail=rollout.detail,
            reward=rollout.reward,
            score=_score(rollout),
            score_error=rollout.score_error,
            turns=rollout.session.turns,
            sampled=rollout.ledger.generated,
            agent_log=agent_log,
            refusals=rollout.session.refusals,
            last_words=None if rollout.outcome in ENDED_WELL else next(iter(log_end[-1:]), None),
            log_end=log_end,
            agent_result=rollout.agent_result,
        )

    @classmethod
    def of_stored(cls, stored: StoredLine) -> Self:
        """Return the line of a session without a rollout."""
        end, why = stored.end, _WHY.get(stored.state, "it is not closed")
        known = (
            cls(stored.session_id, state=stored.state, detail=why)
            if end is None
            else cls(stored.session_id, outcome=end.outcome, detail=end.reason, reward=end.reward)
        )
        return replace(known, sampled=stored.sampled).with_origin(stored)

    def with_origin(self, stored: StoredLine) -> Self:
        """Return the line with the session that it inherits from."""
        inherits = stored.inherits
        return self if inherits is None else replace(self, inherits=inherits.session_id, forked_at=inherits.before)


def _score(rollout: RolloutRecord) -> Json:
    reward = {} if rollout.reward is None else {"reward": rollout.reward}
    return {**reward, **rollout.judged, **({"details": rollout.score} if rollout.score else {})}


@dataclass(frozen=True, slots=True)
class Band:
    """A time that concerned all sessions, in Unix seconds."""

    kind: str
    """`pause`, `drain`, `update` (of weights, with paused engines), or `fault`."""
    begin: float
    end: float | None
    """None if not recorded. A fault ends when it begins, but may cause other bands."""
    words: str


def hold_band(hold: HoldTime) -> Band:
    return Band(
        "update" if hold.engines else str(hold.kind),
        require_finite(hold.began_at),
        None if hold.ended_at is None else require_finite(hold.ended_at),
        f"by {hold.holder}",
    )


@dataclass(frozen=True, slots=True)
class RunView:
    """A run without its conversations."""

    source: str
    """Requested path or server address."""
    sessions: Sequence[SessionLine]
    status: str | None = None
    """None for a store, or if the run continues or was killed."""
    suite: str | None = None
    starts: Sequence[Json] = ()
    """`at` (Unix seconds) and `command` of each start and resumption."""
    versions: Mapping[str, str | None] = field(default_factory=dict)
    tokenizer: Path | None = None
    """Folder of the run's tokenizer on this machine."""
    ledger: Json | None = None
    audit: Json = field(default_factory=dict)
    """Report of the run's audit, or empty."""
    bands: Sequence[Band] = ()
    steps: Sequence[Mapping[str, float]] = ()
    """Figures of each training step."""
    missing: Sequence[str] = ()
    """A sentence for each missing part."""
    superseded: Sequence[SessionLine] = ()
    """Sessions of attempts that were repeated."""

    @property
    def command(self) -> str:
        """Command that shows the whole run."""
        return f"harness show {'--server ' if '://' in self.source else ''}{quote(self.source)}"

    def find(self, name: str) -> SessionLine:
        """Return the session with that number, id or unique id prefix. Raises `RunError`."""
        known = [*self.sessions, *self.superseded]
        begun = [line for line in known if line.session_id is not None and line.session_id.startswith(name)]
        if name.isdecimal() and len(name) < SHORT_ID and any(line.number is not None for line in self.sessions):
            begun = [line for line in self.sessions if line.number == int(name)]
        if len(begun) != 1:
            kind = "no session" if not begun else f"{len(begun)} sessions"
            raise RunError(
                f"{self.source} has {kind} {name!r}: expected the number of one, or the beginning of one id;"
                f" `{self.command}` lists them"
            )
        return begun[0]


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
