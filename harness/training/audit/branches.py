"""Branches of recorded sessions as an audit reads them: tokens, what the engine reported, and who sampled them. Pure.

A token is audited in the first branch that contains it, unless a script or a guard chose it, or a grammar left some
candidates out.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from harness.errors import MalformedRequest
from harness.samples.versions import NOT_SAMPLED, expand_spans, version_of
from harness.sampling_masks import SampleMasks
from harness.sessions.session import Session
from harness.token_rows import RowState, SampleRows
from harness.tokens.chat_tokenizer import ChatTokenizer, SampledTurn
from harness.training.audit.causes import GapCause
from harness.types import Json, Logprobs, SamplingParams, TokenIds, Turn, as_ids

_TAIL = 64  # ids of a prompt's end, enough for every template


class Pass(NamedTuple):
    """Pass of the engine over the tokens `start..stop` (end exclusive), whose keys and values were not in its cache."""

    start: int
    first: int
    """First position whose logits were wanted."""
    stop: int
    version: int


@dataclass(frozen=True, slots=True, eq=False)
class BranchTokens:
    """The tokens of a branch, as one side reads them."""

    ids: TokenIds
    positions: npt.NDArray[np.int64]
    passes: Sequence[Pass]
    """Passes of the engine, in order; the cache before `start` comes from earlier ones."""
    rows: SampleRows | None
    """Experts of each token, chosen in its first pass."""

    def first(self, tokens: int) -> Self:
        """Return the branch with its first `tokens` audited tokens."""
        return replace(self, positions=self.positions[:tokens])

    def rows_of(self, version: int, start: int, stop: int) -> SampleRows | None:
        """Return the rows of `start..stop` (end exclusive) that passes under `version` chose."""
        if self.rows is None:
            return None
        chose = np.full(self.ids.size, NOT_SAMPLED, np.int32)
        for step in reversed(self.passes):
            chose[step.start : step.stop] = step.version
        own = self.rows.between(start, stop)
        return replace(own, states=np.where(chose[start:stop] == version, own.states, RowState.NOT_READ))


@dataclass(frozen=True, slots=True, eq=False)
class AuditedBranch:
    """A branch. Columns have one value for each audited token."""

    session_id: str
    recorded: BranchTokens
    rendered: BranchTokens | None
    """With the text between sampled tokens as the trainer's template renders it; None if that is not known."""
    logprobs: Logprobs
    turns: npt.NDArray[np.int32]
    workers: npt.NDArray[np.str_]
    versions: npt.NDArray[np.int32]
    params: Sequence[SamplingParams]
    masks: SampleMasks | None
    again: Logprobs
    """Logprobs by the engine when it scored the tokens again, alone; NaN where it did not."""

    @property
    def passed_versions(self) -> list[int]:
        """Versions of the weights of its passes, in ascending order."""
        return sorted({step.version for step in self.recorded.passes})

    def first(self, tokens: int) -> Self:
        """Return the branch with its first `tokens` audited tokens."""
        names = ("logprobs", "turns", "workers", "versions", "params", "again")
        columns: dict[str, Any] = {name: getattr(self, name)[:tokens] for name in names}
        recorded = self.recorded.first(tokens)
        rendered = None if self.rendered is None else self.rendered.first(tokens)
        masks = None if self.masks is None else self.masks.part(0, tokens)
        return replace(self, recorded=recorded, rendered=rendered, masks=masks, **columns)

    @classmethod
    def of_session(cls, session: Session, chat_tokenizer: ChatTokenizer | None) -> Iterator[Self]:
        """Return the branches of `session`, whose turns have their rows. Raises `UnknownWeightVersion`."""
        seen: set[int] = set()
        notes = [turn.notes for turn in session.turns if turn.notes.tool_definitions]
        tools = {each.toolset: each.tool_definitions for each in notes}
        for branch in session.plan().delivered:
            new = {turn.index for turn in branch.kept if turn.index not in seen and _is_audited(turn)}
            if new:
                seen |= new
                rendered = None if chat_tokenizer is None else _render(branch.kept, tools, chat_tokenizer)
                yield cls._of(session.session_id, branch.kept, new, rendered)

    @classmethod
    def _of(cls, session_id: str, turns: Sequence[Turn], new: set[int], contexts: Sequence[TokenIds] | None) -> Self:
        recorded = [turn.context_ids for turn in turns]
        taken = [(turn, slice(0, turn.masked_from if turn.index in new else 0)) for turn in turns]
        read, masked = _read(turns, recorded, taken), [turn.masks for turn in turns if turn.masks is not None]
        counts = [part.stop for _, part in taken]
        return cls(
            session_id,
            read,
            None if contexts is None else _read(turns, contexts, taken),
            np.concatenate([turn.logprobs[part] for turn, part in taken]),
            np.repeat(np.asarray([turn.index for turn in turns], np.int32), counts),
            np.concatenate([_workers(turn)[part] for turn, part in taken]),
            np.concatenate([expand_spans(turn.version_spans, turn.output_ids.size)[part] for turn, part in taken]),
            [turn.params for turn, count in zip(turns, counts, strict=True) for _ in range(count)],
            SampleMasks.of_turns(masked, 0, read.ids.size).at(read.positions) if masked else None,
            np.full(read.positions.size, np.nan, np.float32),
        )


@dataclass(frozen=True, slots=True)
class ReadBranch:
    """A branch, and its logprobs by a reference."""

    branch: AuditedBranch
    factors: Sequence[float]
    """Factors of the temperature."""
    tables: Mapping[frozenset[GapCause], npt.NDArray[np.float32]]
    """Logprobs [2, factors, tokens] without and with candidates, by the causes that the reference follows."""

    @property
    def possible(self) -> frozenset[GapCause]:
        """Causes that could make a difference to the passes of the reference."""
        return max(self.tables, key=len)

    def logprobs(self, causes: frozenset[GapCause], factors: Sequence[float]) -> npt.NDArray[np.float32]:
        """Return logprobs [factors, tokens] of a reference that follows `causes`."""
        table = self.tables[effective(causes & self.possible)][int(GapCause.MASK in causes)]
        rows: npt.NDArray[np.float32] = table[[self.factors.index(each) for each in factors]]
        return rows


def effective(causes: frozenset[GapCause]) -> frozenset[GapCause]:
    """Return `causes` without the ones that change nothing next to the others."""
    # With one version of the weights, a cache holds what they compute.
    return causes if GapCause.VERSION in causes else causes - {GapCause.CACHE}


def _is_audited(turn: Turn) -> bool:
    return turn.masked_from > 0 and not turn.params.forbids_tokens


def _render(
    turns: Sequence[Turn], tools: Mapping[str, Sequence[Json]], chat_tokenizer: ChatTokenizer
) -> list[TokenIds]:
    # A prompt with a forced call, or one that the template refuses, stays as recorded.
    root, rendered, after_tools = turns[0], [], False
    opens_with_system = root.messages_delta[0]["role"] == "system" if root.messages_delta else False
    told = tools.get(root.notes.toolset, ())
    for parent, turn in zip((None, *turns), turns, strict=False):
        ids: list[int] | None = None
        try:
            chat = chat_tokenizer.with_variables(root.notes.template_variables)
            if parent is None:
                ids = chat.render_ids(turn.messages_delta, told)
            else:
                tail = parent.context_ids[-_TAIL:].tolist()
                previous = SampledTurn(parent.reply, parent.output_ids.tolist(), tail, opens_with_system, after_tools)
                ids = chat.extend_ids(previous, turn.messages_delta, told)
        except MalformedRequest:
            pass
        rendered.append(turn.context_ids if ids is None else as_ids(ids))
        after_tools = bool(turn.messages_delta) and turn.messages_delta[-1]["role"] == "tool"
    return rendered


def _parts(turns: Sequence[Turn], contexts: Sequence[TokenIds]) -> list[TokenIds]:
    return [part for turn, context in zip(turns, contexts, strict=True) for part in (context, turn.output_ids)]


def _read(turns: Sequence[Turn], contexts: Sequence[TokenIds], taken: Sequence[tuple[Turn, slice]]) -> BranchTokens:
    parts = _parts(turns, contexts)
    ends = np.cumsum([part.size for part in parts])
    positions = [np.arange(start, end) for start, end in ends.reshape(-1, 2)]
    passes: list[Pass] = []
    for turn, places in zip(turns, positions, strict=True):
        before = int(places[0]) - 1
        # A cache that the engine did not report is none, and whose weights filled another session's is not known.
        cached = before + min(0, (turn.notes.cached_tokens or 0) - turn.prompt_length + 1)
        start = min(max(0, cached), passes[-1].stop) if passes else 0
        for span in turn.version_spans:
            stop = before + span.end
            passes.append(Pass(start, before + span.start, stop, version_of(span)))
            start = stop
    return BranchTokens(
        as_ids(np.concatenate(parts)),
        np.concatenate([place[part] for place, (_, part) in zip(positions, taken, strict=True)]),
        passes,
        _rows(turns, contexts),
    )


def _rows(turns: Sequence[Turn], contexts: Sequence[TokenIds]) -> SampleRows | None:
    kept = [turn.rows for turn in turns if turn.rows is not None]
    if not kept:
        return None
    recorded, parts = SampleRows.of_turns(kept, turns[-1].prompt_length + turns[-1].output_ids.size), []
    for turn, context in zip(turns, contexts, strict=True):
        output, end = turn.prompt_length, turn.prompt_length + turn.output_ids.size
        # Another text was read by other experts.
        is_same = np.array_equal(context, turn.context_ids)
        parts += [recorded.between(output - context.size, output) if is_same else None, recorded.between(output, end)]
    return SampleRows.join(parts, [part.size for part in _parts(turns, contexts)])


def _workers(turn: Turn) -> npt.NDArray[np.str_]:
    names = np.full(turn.output_ids.size, "", dtype=object)
    for segment in turn.segments:
        names[segment.start : segment.end] = segment.worker
    return names.astype(np.str_)
