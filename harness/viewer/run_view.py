"""A run or a store as a reader sees it: how it ended, and a line for each of its sessions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote
from typing import Self

from harness.errors import RunError
from harness.sessions.hold_times import HoldTime
from harness.sessions.lifecycle import CloseReason, Phase
from harness.store.rows import StoredLine
from harness.suite.record.rollout_table import RolloutRecord
from harness.types import Json
from harness.viewer.damage import require_finite

SHORT_ID = 8
"""Digits of a session's id in lists; fewer of them, without a letter, are the number of a rollout."""


_WHY: Mapping[str, str] = {
    CloseReason.DELETED: "its owner deleted it without a word on how it ended",
    CloseReason.DRAINED: "the server was drained while it was created",
    CloseReason.IDLE: "it was not used for longer than the server keeps such sessions",
    CloseReason.TAKEN_OVER: "another session went on with its turns",
    CloseReason.DAMAGED: "it could not be read back",
    Phase.CLOSED: "it is closed, and the store is too old to say why",
    Phase.CLOSING: "it was drained, and is not closed",
    Phase.ENDED: "its agent has ended, and it is not closed",
}


@dataclass(frozen=True, slots=True)
class SessionLine:
    """A session, and the rollout that it belongs to, where there is one."""

    session_id: str | None
    """None of a rollout that came to none."""
    number: int | None = None
    """Of the rollout in its run."""
    scenario: str | None = None
    group: int | None = None
    """Position of its prompt in the run."""
    seed: int | None = None
    """The same for the same prompt and place in its group, in every run of a scenario with one seed."""
    outcome: str | None = None
    """How the rollout ended; None of one that goes on or was killed, and where no owner has told it."""
    state: str | None = None
    """The phase of a session without an outcome, or why it is closed."""
    cause: str | None = None
    """Who is to blame; None when nothing went wrong."""
    detail: str = ""
    reward: float | None = None
    score_error: str | None = None
    turns: int | None = None
    sampled: int | None = None
    """Tokens, those included that were discarded."""
    agent_log: Path | None = None
    refusals: Mapping[str, int] | None = None
    """Model calls that were answered with an error, by its code; None where nobody has kept that."""
    last_words: str | None = None
    """The last line of the agent's log, of one that did not end by itself."""

    @classmethod
    def of(cls, rollout: RolloutRecord, agent_log: Path | None, last_words: str | None) -> Self:
        """The line of a rollout."""
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
            score_error=rollout.score_error,
            turns=rollout.session.turns,
            sampled=rollout.ledger.generated,
            agent_log=agent_log,
            refusals=rollout.session.refusals,
            last_words=last_words,
        )

    @classmethod
    def of_stored(cls, stored: StoredLine) -> Self:
        """The line of a session that belongs to no rollout on record."""
        end = stored.end
        if end is None:
            why = _WHY.get(stored.state, "it is not closed")
            return cls(stored.session_id, state=stored.state, detail=why, sampled=stored.sampled)
        return cls(stored.session_id, outcome=end.outcome, detail=end.reason, reward=end.reward, sampled=stored.sampled)


@dataclass(frozen=True, slots=True)
class Band:
    """What happened to all sessions at once, and when; times are Unix seconds."""

    kind: str
    """`pause`, `drain`, `update` (of the weights: the engines stood still too), or `fault`."""
    begin: float
    end: float | None
    """None of one without an end on record. A fault ends when it begins: what it started may be a band of its own."""
    words: str


def hold_band(hold: HoldTime) -> Band:
    """The band of a hold on the gate."""
    return Band(
        "update" if hold.engines else str(hold.kind),
        require_finite(hold.began_at),
        None if hold.ended_at is None else require_finite(hold.ended_at),
        f"by {hold.holder}",
    )


@dataclass(frozen=True, slots=True)
class RunView:
    """Everything about a run but its conversations."""

    source: str
    """The path, or the address of the server, that was asked for."""
    sessions: Sequence[SessionLine]
    status: str | None = None
    """How the run ended; None of one that goes on or was killed, and of a store."""
    suite: str | None = None
    starts: Sequence[Json] = ()
    """`at` (Unix seconds) and `command` of each time that it was begun or taken up."""
    versions: Mapping[str, str | None] = field(default_factory=dict)
    tokenizer: Path | None = None
    """The folder of the tokenizer that the tokens are of, where it is on this machine."""
    ledger: Json | None = None
    bands: Sequence[Band] = ()
    """In the order in which they began."""
    missing: Sequence[str] = ()
    """What is not there, or cannot be read: a sentence each."""
    superseded: Sequence[SessionLine] = ()
    """Sessions of attempts that were played again."""

    @property
    def command(self) -> str:
        """The command that shows all of it."""
        return f"harness show {'--server ' if '://' in self.source else ''}{quote(self.source)}"

    def find(self, name: str) -> SessionLine:
        """The session with that number, that id, or the only one whose id begins so. Raises `RunError`."""
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
