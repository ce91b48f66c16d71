"""One session takes over from another: a rollout that was cut short goes on in a later one.

The agent of the later rollout begins anew. As long as it asks what its predecessor asked it gets the answers on record
(`retries`), the turn that was cut short goes on from its partial output as the same turn (`continuation`), and what
comes then is new: nothing is sampled twice. The turns move, they are not copied; their tokens, and those of the
turns that are left behind, are in the ledger of the successor from then on.
"""

from collections.abc import Sequence
from dataclasses import replace

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
    """`config` for the session that takes the turns `taken` over from `previous`, with the metadata of both.

    Raises `MalformedRequest` when `previous` cannot be taken over.
    """
    if previous.phase not in (Phase.CLOSING, Phase.ENDED):
        raise MalformedRequest(
            f"resumes: expected a session that was drained or ended, this one is {previous.phase}", param="resumes"
        )
    if previous.turns_in_flight:
        raise MalformedRequest(
            f"resumes: {len(previous.turns_in_flight)} turns of that session are still in flight; ask again when they"
            " have ended",
            param="resumes",
        )
    if config.matching not in ((), previous.config.matching):
        raise MalformedRequest(
            f"matching: expected none, which keeps that of the resumed session, or {list(previous.config.matching)}",
            param="matching",
        )
    if config.script not in (None, previous.config.script):
        raise MalformedRequest("script: expected that of the resumed session, or none, which keeps it", param="script")
    ledger = previous.ledger()
    return replace(
        config,
        metadata={**previous.config.metadata, **config.metadata},
        matching=previous.config.matching,
        script=previous.config.script,
        left_behind=ledger.generated - sum(turn.sampled_tokens for turn in taken),
        unknown_left_behind=ledger.unknown - Unknown.of(each for turn in taken for each in turn.unknown),
    )


def turns_to_take_over(turns: Sequence[Turn], limits: Limits, live: int | None) -> list[Turn]:
    """The turns of `turns`, which come in order of admission, that a session with `limits` can go on from.

    Those whose branch before them is COMPLETED and that have an output, or the beginning of one, none of it too old
    under the version `live`, where that is known. Nobody has been handed their answers yet; the ones that were aborted
    wait to be taken up.
    """
    taken: dict[int, Turn] = {}
    for turn in turns:
        parent = None if turn.parent is None else taken.get(turn.parent)
        goes_on = turn.parent is None or (parent is not None and parent.status is TurnStatus.COMPLETED)
        if turn.status is TurnStatus.FAILED or not goes_on:
            continue
        if live is not None and is_too_old(limits, oldest_version(turn.version_spans), live):
            continue  # of the turns before it none is, or they would not have been taken
        is_cut = turn.status is TurnStatus.ABORTED and not turn.is_suspended
        taken[turn.index] = replace(turn, end=TurnEnd.CLIENT_LEFT if is_cut else turn.end, delivered=False)
    return list(taken.values())
