"""Delivery: choose the branches that reach the trainer, then set masks and weights (I13).

A branch ends with a trained turn that no other one extends. The merge rule (I3) cuts it after the first turn that is
not COMPLETED. The first delivered sample that contains a token trains it: a consumer that skips samples must use
`SampleDelivery`.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from enum import StrEnum
from importlib import import_module
from itertools import takewhile
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec import structs

from harness.errors import MalformedRequest
from harness.samples.columns import cut_columns
from harness.samples.roles import CallRole, Role, find_roles
from harness.samples.versions import NOT_SAMPLED
from harness.turn_ends import TurnEnd, TurnStatus
from harness.types import Sample, Turn


class Selection(StrEnum):
    """Branches to deliver, or `package.module:function`."""

    ALL = "all"
    """In the order in which their last turns were admitted."""
    ONE = "one"
    """Most tokens to train; last one if equal."""


DEPRECATED_SELECTIONS: Mapping[str, Selection] = {  # to be removed in the next release
    "last": Selection.ONE,
    "main": Selection.ALL,
    "leaves": Selection.ALL,
}

TRAINED_ROLES = (Role.MAIN, Role.COMPACTION, Role.SUBAGENT)

TRAINABLE_ROLES = frozenset({*TRAINED_ROLES, Role.RESAMPLE})
"""Roles that a policy may name."""


@dataclass(frozen=True, slots=True)
class Branch:
    """A path of a session, cut by the merge rule."""

    kept: tuple[Turn, ...]
    dropped: tuple[Turn, ...]
    """Turns behind the first that is not COMPLETED or lacks required rows; that one too if it has none at first."""


ChooseBranches = Callable[[Sequence[Branch]], Collection[int]]
"""Custom selection: returns branch indices."""


class DeliveryPlan(NamedTuple):
    roles: Mapping[int, CallRole]
    """By turn index."""
    trained_roles: Set[Role]
    branches: Sequence[Branch]
    delivered: Sequence[Branch]
    requires_rows: bool = False

    def lacks_rows(self, turn: Turn) -> bool:
        """Return True if a sample ends in or before the turn, because rows of it are missing."""
        return self.requires_rows and bool(turn.notes.missing_rows)

    def is_trained(self, turn: Turn) -> bool:
        return self.roles[turn.index].role in self.trained_roles


def plan_delivery(
    turns: Sequence[Turn],
    selection: str = Selection.ALL,
    trained_roles: Collection[Role] = TRAINED_ROLES,
    *,
    requires_rows: bool = False,
) -> DeliveryPlan:
    """Find roles and branches of `turns`, in order of admission, and select branches. Raises `MalformedRequest`."""
    roles = find_roles(turns)
    usable = [turn for turn in turns if turn.is_usable and turn.output_ids.size]
    trained = [turn for turn in usable if roles[turn.index].role in trained_roles]
    plan = DeliveryPlan(roles, frozenset(trained_roles), [], [], requires_rows)
    branches = list(_merge_branches(turns, trained, plan.lacks_rows))
    plan = plan._replace(branches=branches, delivered=branches)
    selection = {**DEPRECATED_SELECTIONS, "turns": Selection.ALL}.get(selection, selection)  # "turns": in old stores
    if selection == Selection.ALL:
        return plan
    if selection == Selection.ONE:
        sizes = [sum(turn.masked_from for turn in each.kept if plan.is_trained(turn)) for each in branches]
        best = max(range(len(sizes)), key=lambda number: (sizes[number], number), default=None)
        return plan._replace(delivered=[] if best is None else [branches[best]])
    chosen = load_selection(selection)(branches)
    if not all(number in range(len(branches)) for number in chosen):
        raise MalformedRequest(
            f"selection: expected {selection} to return numbers of its branches, 0 to {len(branches) - 1};"
            f" got {chosen!r:.60}",
            param="selection",
        )
    return plan._replace(delivered=[branches[number] for number in sorted(set(chosen))])


def load_selection(path: str) -> ChooseBranches:
    module, separator, function = path.partition(":")
    try:
        found = getattr(import_module(module), function) if separator else None
    except (ImportError, AttributeError, ValueError) as error:
        raise MalformedRequest(f"selection: cannot load {path!r}: {error}", param="selection") from error
    if not callable(found):
        raise MalformedRequest(
            f"selection: expected {', '.join(Selection)}, or package.module:function; got {path[:64]!r}",
            param="selection",
        )
    choose: ChooseBranches = found
    return choose


def _merge_branches(
    turns: Sequence[Turn], trained: Sequence[Turn], lacks_rows: Callable[[Turn], bool]
) -> Iterator[Branch]:
    by_index = {turn.index: turn for turn in turns}
    inner: set[int] = set()
    for turn in trained:
        parent = turn.parent
        while parent is not None and parent not in inner:
            inner.add(parent)
            parent = by_index[parent].parent
    delivered: set[int] = set()
    for leaf in trained:
        if leaf.index in inner:
            continue
        path = [leaf]
        while path[-1].parent is not None:
            path.append(by_index[path[-1].parent])
        path.reverse()
        completed = list(takewhile(lambda turn: turn.status is TurnStatus.COMPLETED, path))
        end = len(completed) + 1  # the first turn that is not COMPLETED is kept, too (I3)
        kept = tuple(takewhile(lambda turn: not lacks_rows(turn), path[:end]))
        lacking = path[len(kept) : end][:1]
        kept += tuple(cut_turn(turn, turn.notes.rows_until) for turn in lacking if turn.notes.rows_until)
        if not kept:
            continue
        branch = Branch(kept, tuple(path[len(kept) :]))
        # The cut may leave only turns that an earlier branch delivers already.
        is_new = branch.kept[-1].index not in delivered and any(turn.output_ids.size for turn in branch.kept)
        if is_new:
            delivered.update(turn.index for turn in branch.kept)
            yield branch


def cut_turn(turn: Turn, size: int) -> Turn:
    """Return the turn with the first `size` output tokens, ended by length if it was whole."""
    over, end = int(turn.output_ids.size) - size, turn.prompt_length + size
    proximal, versions = turn.proximal_logprobs, turn.proximal_versions
    is_whole = turn.status in (TurnStatus.COMPLETED, TurnStatus.TRUNCATED)
    return structs.replace(
        turn,
        status=TurnStatus.TRUNCATED if is_whole else turn.status,
        end=TurnEnd.LENGTH if is_whole else turn.end,  # the repetition that ended it, say, is in no sample
        output_ids=turn.output_ids[:size],
        logprobs=turn.logprobs[:size],
        version_spans=tuple(replace(span, end=min(span.end, size)) for span in turn.version_spans if span.start < size),
        forced_tokens=max(0, turn.forced_tokens - over),
        proximal_logprobs=None if proximal is None else proximal[:size],
        proximal_versions=None if versions is None else versions[:size],
        rows=None if turn.rows is None else turn.rows.until(end - 1),
        masks=None if turn.masks is None else turn.masks.until(end),
        teachers={name: each.first(size) for name, each in turn.teachers.items()},
    )


class SampleDelivery:
    """Masks for the samples of one rollout, taken one by one. Takes all of its samples."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self._trainable: dict[int, npt.NDArray[np.uint8]] = {}
        self._taken: set[int] = set()
        for sample in samples:
            for turn, span in turn_spans(sample):
                mask, known = sample.loss_mask[span], self._trainable.get(turn)
                # Only one of the samples that share a turn has it unmasked.
                self._trainable[turn] = mask if known is None or not known.any() else known

    def mask(self, sample: Sample) -> Sample:
        """Return `sample` with mask 1 on trainable tokens that no taken sample contains."""
        mask = sample.loss_mask.copy()
        for turn, span in turn_spans(sample):
            mask[span] = 0 if turn in self._taken else self._trainable[turn][: mask[span].size]
        return replace(sample, loss_mask=mask)

    def take(self, sample: Sample) -> Sample:
        """Mask `sample`, and mark its turns as delivered."""
        masked = self.mask(sample)
        self._taken.update(turn for turn, _ in turn_spans(sample))
        return masked


def deliver(samples: Sequence[Sample], kept: Collection[int]) -> list[Sample]:
    """Return the samples with the indices `kept`, with new masks and weights."""
    delivery = SampleDelivery(samples)
    return weigh([delivery.take(sample) for number, sample in enumerate(samples) if number in kept])


def take_one(samples: Sequence[Sample]) -> list[Sample]:
    """Return only the sample with the most tokens to train (the last one if equal)."""
    sizes = [int(SampleDelivery(samples).mask(sample).loss_mask.sum()) for sample in samples]
    best = max(range(len(samples)), key=lambda number: (sizes[number], number), default=-1)
    return deliver(samples, {best})


def cut_response(sample: Sample, length: int) -> Sample:
    """Cut the response to `length` tokens. Drop turns whose output begins later."""
    if sample.response_length <= length:
        return sample
    prompt = sample.tokens.size - sample.response_length
    kept = [(turn, [span.start, min(span.stop, length)]) for turn, span in turn_spans(sample) if span.start < length]
    return replace(
        sample,
        tokens=sample.tokens[: prompt + length],
        response_length=length,
        turn_rewards=sample.turn_rewards[: len(kept)],
        metadata={**sample.metadata, "turns": [turn for turn, _ in kept], "spans": [span for _, span in kept]},
        **cut_columns(sample, length),
    )


def weigh(samples: Sequence[Sample]) -> list[Sample]:
    """Set each weight to the sample's share of tokens to train."""
    sizes = [int(sample.loss_mask.sum()) for sample in samples]
    total = sum(sizes)
    shares = [size / total if total else 1 / len(samples) for size in sizes]
    return [replace(sample, weight=share) for sample, share in zip(samples, shares, strict=True)]


class DeliveredTokens(NamedTuple):
    """Sampled tokens of a rollout, each counted once."""

    trained: int
    masked: int

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> "DeliveredTokens":
        trained = sum(int(((each.loss_mask == 1) & (each.behavior_versions != NOT_SAMPLED)).sum()) for each in samples)
        sizes: dict[int, int] = {}
        for sample in samples:
            for turn, span in turn_spans(sample):
                # Samples may hold a shared turn cut to different lengths; the longest counts.
                sizes[turn] = max(sizes.get(turn, 0), sample.loss_mask[span].size)
        return cls(trained, sum(sizes.values()) - trained)


def turn_spans(sample: Sample) -> Iterator[tuple[int, slice]]:
    """Yield turn indices with the slices of their outputs in the response."""
    metadata: Mapping[str, Any] = sample.metadata
    for turn, (start, end) in zip(metadata.get("turns", ()), metadata.get("spans", ()), strict=False):
        yield turn, slice(start, end)
