"""Takeover: a new session continues an interrupted one.

The new agent starts over. It gets recorded answers to repeated requests (`retries`), and the interrupted turn continues
(`continuation`), so nothing is sampled twice. All tokens move to the successor's ledger.
"""

from collections.abc import Sequence
from dataclasses import replace

from msgspec import structs

from harness.errors import MalformedRequest
from harness.samples.proximal import oldest_version
from harness.sessions.admission import Limits, is_too_old
from harness.sessions.ledger import Unknown
from harness.sessions.lifecycle import Phase
from harness.sessions.session import Session
from harness.sessions.session_config import SessionConfig
from harness.turn_ends import TurnEnd, TurnStatus
from harness.types import Turn


def successor_config(previous: Session, config: SessionConfig, taken: Sequence[Turn]) -> SessionConfig:
    """Return `config` with what `previous` passes on. Raise `MalformedRequest`."""
    if previous.phase not in (Phase.CLOSING, Phase.ENDED):
        raise MalformedRequest(
            f"resumes: expected a session that was drained or ended, this one is {previous.phase}", param="resumes"
        )
    if previous.turns_in_flight:
        raise MalformedRequest(
            f"resumes: {len(previous.turns_in_flight)} turns of that session are still in flight; retry when they"
            " have ended",
            param="resumes",
        )
    if config.matching not in ((), previous.config.matching):
        raise MalformedRequest(
            f"matching: expected none, which keeps the resumed session's, or {list(previous.config.matching)}",
            param="matching",
        )
    if config.script not in (None, previous.config.script):
        raise MalformedRequest("script: expected the resumed session's, or none, which keeps it", param="script")
    if config.record not in ((), previous.config.record):
        raise MalformedRequest("record: expected the resumed session's, or none, which keeps it", param="record")
    ledger, own = previous.ledger(), [turn for turn in taken if not turn.notes.inherited]
    return replace(
        config,
        metadata={**previous.config.metadata, **config.metadata},
        matching=previous.config.matching,
        script=previous.config.script,
        record=previous.config.record,
        inherits=previous.config.inherits,
        left_behind=ledger.generated - sum(turn.sampled_tokens for turn in own),
        unknown_left_behind=ledger.unknown - Unknown.of(each for turn in own for each in turn.unknown),
    )


def turns_to_take_over(turns: Sequence[Turn], limits: Limits, live: int | None) -> list[Turn]:
    """Return the turns that a session with `limits` can continue."""
    # Turns come in order of admission. One is taken if its branch so far is COMPLETED and its output, whole or partial,
    # is not too old under `live`.
    taken: dict[int, Turn] = {}
    for turn in turns:
        parent = None if turn.parent is None else taken.get(turn.parent)
        goes_on = turn.parent is None or (parent is not None and parent.status is TurnStatus.COMPLETED)
        if turn.status is TurnStatus.FAILED or not goes_on:
            continue
        if live is not None and is_too_old(limits, oldest_version(turn.version_spans), live):
            continue  # its ancestors are fresh, or they would not be in `taken`
        # Aborted turns wait to be taken up. The new agent has received none of the answers.
        is_cut = turn.status is TurnStatus.ABORTED and not turn.is_suspended
        teachers = {} if turn.status is TurnStatus.ABORTED else turn.teachers  # its tokens may change
        taken[turn.index] = structs.replace(
            turn, end=TurnEnd.CLIENT_LEFT if is_cut else turn.end, delivered=False, teachers=teachers
        )
    return list(taken.values())
