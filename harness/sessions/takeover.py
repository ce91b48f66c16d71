"""What a session hands to the one that takes over from it: a rollout that was cut short goes on in a later one.

The agent of the later rollout begins anew. As long as it asks what its predecessor asked it gets the answers on record
(`retries`), the turn that was cut short goes on from its partial output as the same turn (`continuation`), and what
comes then is new: nothing is sampled twice. The turns move, they are not copied; their tokens, and those of the
turns that are left behind, are in the ledger of the successor from then on.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from harness.errors import MalformedRequest
from harness.samples.proximal import oldest_version
from harness.sessions.admission import Limits, is_too_old
from harness.sessions.lifecycle import Phase
from harness.sessions.session import Session, SessionConfig
from harness.turn_ends import TurnEnd, TurnStatus
from harness.types import Turn


def successor_config(previous: Session, config: SessionConfig, taken: Iterable[Turn]) -> SessionConfig:
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
    if previous.config.matching != config.matching:
        raise MalformedRequest(
            f"matching: expected that of the resumed session, {list(previous.config.matching)}", param="matching"
        )
    left_behind = previous.ledger().generated - sum(turn.sampled_tokens for turn in taken)
    return replace(config, metadata={**previous.config.metadata, **config.metadata}, left_behind=left_behind)


def turns_to_take_over(turns: Sequence[Turn], limits: Limits, live: int | None) -> list[Turn]:
    """The turns of `turns`, which come in order of admission, that a session with `limits` can go on from.

    Those whose branch before them is COMPLETED and that have an output, or the beginning of one, none of it too old
    under the version `live`, where that is known. Nobody has been handed their answers yet; the ones that were aborted
    wait to be taken up.
    """
    taken: dict[int, Turn] = {}
    for turn in turns:
        if turn.status is not TurnStatus.FAILED and _goes_on(turn, taken) and _is_fresh(turn, limits, live):
            taken[turn.index] = _waiting(turn)
    return list(taken.values())


def _is_fresh(turn: Turn, limits: Limits, live: int | None) -> bool:
    """Whether the turn's own tokens may be gone on from; those before it have been looked at."""
    return live is None or not is_too_old(limits, oldest_version(turn.version_spans), live)


def _goes_on(turn: Turn, taken: Mapping[int, Turn]) -> bool:
    if turn.parent is None:
        return True
    parent = taken.get(turn.parent)
    return parent is not None and parent.status is TurnStatus.COMPLETED


def _waiting(turn: Turn) -> Turn:
    if turn.status is TurnStatus.ABORTED and not turn.is_suspended:
        return replace(turn, end=TurnEnd.CLIENT_LEFT, delivered=False)
    return replace(turn, delivered=False)
