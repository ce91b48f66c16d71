"""State of a session: its configuration, its recorded turns, and what it allows next.

The server asks how to treat a request (`treatment`), finds its place (`attach`), encodes what is new, admits the turn
(`admit`, or `take_up` if it broke off), samples, stores the outcome (`sessions.turn_outcome`) and records it
(`record`). The session may change in between: each step decides by the current state and changes all or nothing. No
method waits, so one thread needs no lock; others read a `snapshot`.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from copy import copy
from dataclasses import replace
from typing import NamedTuple, Self

from msgspec import structs

from harness.decoding import convert
from harness.errors import BranchEnded, HarnessError, InheritanceEnded, SessionClosing, StoreError
from harness.samples.delivery import DeliveryPlan, plan_delivery
from harness.samples.merge import build_samples
from harness.samples.proximal import oldest_version, score_turns, scoring_start
from harness.samples.versions import version_of
from harness.sessions.admission import TurnPlace, plan_sampling, require_fresh
from harness.sessions.divergence import (
    Divergence,
    Toolset,
    find_divergence,
    find_other_sampling,
    find_other_tools,
    find_other_toolset,
    find_overlooked,
)
from harness.sessions.ledger import Ledger, NewOutput, Unknown, account
from harness.sessions.lifecycle import TRANSITIONS, CloseReason, Command, Phase, advance
from harness.sessions.retries import TREATMENTS, RetryStanding, Treatment, digest_kind, standing
from harness.sessions.script import Step, next_step
from harness.sessions.session_config import AfterIncomplete, MissingRowsPolicy, Recorded, SessionConfig
from harness.sessions.tree import AttachPoint, TurnTree
from harness.sessions.turn_outcome import Admission, TurnRequest, readmit
from harness.sessions.weights.waiting import WaitingTurns
from harness.token_rows import RecordedRows
from harness.tokens.history import History, Prefix
from harness.tokens.matching import ChainKey, normal_form
from harness.turn_ends import TurnStatus
from harness.types import Json, Message, PromptLogprobs, Sample, SamplingWishes, TokenIds, Turn, VersionSpan

IsComparable = Callable[[Turn], bool]
"""True if a turn's logprobs are on the engine's input scale."""


class KnownAnswer(NamedTuple):
    """Answer with a fixed id."""

    turn: int
    response_id: str


class Session:
    def __init__(self, session_id: str, api_key: str, config: SessionConfig, created_at: float) -> None:
        self.session_id = session_id
        self.api_key = api_key
        self.config = config
        self.created_at = created_at
        self.phase = Phase.OPEN
        self.closed_because: CloseReason | None = None
        self.refusals: Counter[str] = Counter()
        """Failed model calls by error code."""
        self.untaught: dict[str, str] = {}
        """Why a teacher has not scored all tokens, by teacher."""
        self.normal_form = normal_form(config.matching)
        self.history = History(self.normal_form)
        self._tree = TurnTree(self.normal_form)
        self._generated = config.left_behind
        self._in_flight: dict[int, Admission] = {}
        self._admitted = 0
        self._asked: Counter[ChainKey] = Counter()
        self._latest_with_body: dict[str, int] = {}
        self.digest_kinds: set[str] = set()
        self._abandoned: set[int] = set()
        self._unasked: dict[ChainKey, tuple[int, ...]] = {}  # inherited turns that the agent has not asked for again
        self._waiting = WaitingTurns()
        self._tools: tuple[Json, ...] | None = None  # of the latest turn; lost in a restart
        self._plan: DeliveryPlan | None = None  # None after a turn has changed

    @property
    def is_open(self) -> bool:
        """True if turns may start and continue."""
        return (self.phase, Command.ADMIT) in TRANSITIONS

    @property
    def is_drained(self) -> bool:
        """True if the rollout was aborted: an interrupted turn is ABORTED and trained as far as it came."""
        return self.phase is Phase.CLOSING

    @property
    def records_rows(self) -> bool:
        """True if turns keep rows with their tokens."""
        return bool(self.config.record)

    @property
    def records_experts(self) -> bool:
        """True if turns keep the experts of their tokens."""
        return Recorded.ROUTED_EXPERTS in self.config.record

    @property
    def row_bytes(self) -> int:
        """Bytes of all rows, which the store may have alone."""
        return sum(turn.notes.row_bytes for turn in self.turns)

    def has_rows(self, turn: Turn) -> bool:
        """Return True if the turn keeps rows: masks only where some tokens were no candidates."""
        return self.records_experts or turn.params.sampling_mask

    @property
    def turns(self) -> Sequence[Turn]:
        """Recorded turns, in order of admission."""
        return self._tree.turns

    @property
    def lasted(self) -> tuple[float, float] | None:
        """Unix seconds of the first call and the last end."""
        turns = self.turns
        return (min(turn.asked_at for turn in turns), max(turn.ended_at for turn in turns)) if turns else None

    @property
    def turns_in_flight(self) -> Sequence[Admission]:
        """Admitted turns without outcome."""
        return list(self._in_flight.values())

    def known_digest(self, digest: str, older: Sequence[str], dialect: str) -> str:
        """Return `digest`, or the `older` one that a turn has."""

        def has(each: str) -> bool:
            index = self._latest_with_body.get(each)
            if index is None:
                return False
            admission = self._in_flight.get(index)
            notes = admission.request.notes if admission else self._tree.turn(index).notes
            return notes.dialect in ("", dialect)  # empty in the oldest stores

        return next(filter(has, older), digest)

    def treatment(self, digest: str, *, says_retry: bool) -> tuple[Treatment, int]:
        """Return a request's treatment and earlier turn, or -1. Raise `SessionClosing`."""
        self._require_open()
        return self._treatment(digest, says_retry)

    def known_answer(self, digest: str, *, says_retry: bool) -> KnownAnswer | None:
        """Return the answer that a repeated request gets now; None for a new call."""
        treatment, index = self._treatment(digest, says_retry)
        if treatment not in (Treatment.REPLAY, Treatment.JOIN):
            return None
        admission = self._in_flight.get(index)
        known = (self._tree.turn(index) if admission is None else admission.request).notes.response_id
        return KnownAnswer(index, known) if known else None

    def find_inherited(self, point: AttachPoint, asked: SamplingWishes) -> Turn | None:
        """Return the inherited turn that a call repeats; None for a new call.

        Raise `InheritanceEnded` for a new call of a strict heir, while inherited turns are left at its place.
        """
        turns = map(self._tree.turn, self._unasked.get(point.key, ()))
        repeated = [turn for turn in turns if convert(turn.sampling["asked"], SamplingWishes) == asked]
        if repeated:
            return max(repeated, key=lambda turn: (turn.parent == point.parent, -turn.index))
        waiting = sorted(index for indices in self._unasked.values() for index in indices)
        left = [index for index in waiting if point.parent in (None, self._tree.turn(index).parent)]
        if left and self.config.inherits is not None and self.config.inherits.strict:
            raise InheritanceEnded(
                f"the restarted agent's request differs from the recorded one of turn {left[0]}; {len(left)}"
                " recorded turns are left"
            )
        return None

    def take_inherited(self, turn: Turn, digest: str, client: Json) -> Turn:
        """Answer the call with that `digest` by an inherited turn. Return the changed turn, to store."""
        notes = structs.replace(turn.notes, asked_again=True, client=client)
        taken = structs.replace(self._tree.turn(turn.index), request_digest=digest, notes=notes)
        left = tuple(index for index in self._unasked.pop(turn.key, ()) if index != turn.index)
        if left:
            self._unasked[turn.key] = left
        self._tree.replace(taken)
        self._latest_with_body[digest] = turn.index
        self.digest_kinds.add(digest_kind(digest))
        self._plan = None
        return taken

    def give_back_inherited(self, turn: Turn, digest: str) -> None:
        """Undo `take_inherited` of the earlier `turn`, which the store did not keep."""
        self._tree.replace(turn)
        self._unasked[turn.key] = (*self._unasked.get(turn.key, ()), turn.index)
        if self._latest_with_body.get(digest) == turn.index:
            del self._latest_with_body[digest]
        self._plan = None

    @property
    def inherits(self) -> bool:
        """True while recorded answers of an earlier session wait for their calls."""
        return bool(self._unasked)

    def turns_until(self, response_id: str) -> list[Turn]:
        """Return the branch up to that response."""
        turn = self._tree.answered_as(response_id)
        return [] if turn is None else self.branch(turn.index)

    def answered_as(self, response_id: str) -> Turn | None:
        return self._tree.answered_as(response_id)

    def caller(self, call_id: str) -> Turn | None:
        return self._tree.caller(call_id)

    def serves(self, turn: Turn) -> bool:
        """Return True if an agent may read the answer (I2)."""
        return turn.is_usable and (
            turn.status is not TurnStatus.ABORTED or self.config.after_incomplete is AfterIncomplete.SERVE
        )

    def attach(self, prefixes: Sequence[Prefix], messages: Sequence[Message]) -> AttachPoint:
        """Return where a request continues. Raise `TurnRefused`."""
        self._require_open()
        point = self._tree.attach(prefixes, messages)
        if point.parent is not None and self.config.after_incomplete is not AfterIncomplete.SERVE:
            status = self._tree.turn(point.parent).status
            if status is not TurnStatus.COMPLETED:
                raise BranchEnded(
                    f"turn {point.parent} of this branch is {status}; what follows it could not be trained"
                )
        return point

    def turn(self, index: int) -> Turn:
        return self._tree.turn(index)

    def branch(self, index: int | None) -> list[Turn]:
        """Return the turns from the root to `index`."""
        return list(self._tree.ancestry(index))[::-1]

    def require_fresh(self, parent: int | None, live: int | None, output: Sequence[VersionSpan] = ()) -> None:
        """Raise `LimitReached` if a branch or `output` is too old."""
        # Nothing is too old while the live version is unknown.
        if self.config.limits.staleness is not None and live is not None:
            spans = [*output, *(span for turn in self.branch(parent) for span in turn.version_spans)]
            require_fresh(self.config.limits, oldest_version(spans), live)

    def script_step(self, point: AttachPoint) -> int | None:
        """Return the step that a turn at `point` says. Raise `ScriptEnded`."""
        if self.config.script is None:
            return None
        return next_step(self.config.script, None if point.parent is None else self._tree.turn(point.parent))

    def divergence(
        self, point: AttachPoint, messages: Sequence[Message], asked: SamplingWishes, tools: Toolset
    ) -> Divergence | None:
        """Return where a request leaves the earlier one that it follows longest; None if it leaves none."""
        if unasked := self._unasked.get(point.key):
            return find_other_sampling(self._tree.turn(unasked[0]).sampling["asked"], asked)
        # A request with changed tools cannot continue any earlier one.
        if point.parent is None and (found := self._other_tools(tools)):
            return found
        children = self._tree.latest_children(point.parent)
        sent = messages[point.matched :] if children else ()
        longest: Divergence | None = None
        for earlier in children:
            recorded = earlier.messages_delta
            if len(sent) > len(recorded):
                recorded = (*recorded, earlier.reply)
            each = find_divergence(recorded, sent, point.matched, self.normal_form)
            if each is None:
                return None
            longest = each if longest is None or each.message > longest.message else longest
        return longest

    def _other_tools(self, sent: Toolset) -> Divergence | None:
        if self._tools is None:  # after a restart, and in an heir
            return find_other_toolset(self._tree.latest_children(None), sent)
        return find_other_tools(self._tools, sent.tools)

    def loose_matches(self, point: AttachPoint, messages: Sequence[Message], known: int) -> list[Divergence]:
        """Return recorded messages that a request spells differently."""
        if point.is_literal:
            return []
        # The answer that it continues, and all that follows the first `known` messages.
        numbers = range(min(known, point.matched - 1), point.matched)
        return find_overlooked(self._tree.ancestry(point.parent), messages, numbers)

    def admit(self, point: AttachPoint, request: TurnRequest, context_length: int, now: float) -> Admission:
        """Start a turn. Raise `TurnRefused` or `PromptTooLong` before any change."""
        before = self._tree.path(point.parent)
        ordinal = self._asked[point.key]
        place = TurnPlace(self._admitted, before.length + request.context_ids.size, point.key, ordinal)
        self._require_open()
        params = plan_sampling(request.asked, self.config.sampling, self.config.limits, place, context_length)
        if Recorded.SAMPLING_MASK in self.config.record:
            params = replace(params, sampling_mask=params.filters_tokens)
        step = self._step(request.notes.script_step)
        if step is not None:
            params = step.plan(params)
        path = before.extend(request.context_ids)
        place_in_tree = (self._admitted, point.parent, point.key, ordinal)
        admission = Admission(*place_in_tree, path, request, params, now, step=step, records_rows=self.records_experts)
        self._in_flight[admission.index] = admission
        self._tools = request.tools
        self._count(admission.index, point.key, ordinal)
        self._latest_with_body[request.digest] = admission.index
        return admission

    def take_up(self, index: int, now: float, response_id: str) -> Admission:
        """Continue a broken-off turn with its parameters and seed. Raise `SessionClosing`."""
        self._require_open()
        turn = self._tree.turn(index)
        path, step = self._tree.path(index).cut(turn.prompt_length), self._step(turn.notes.script_step)
        admission = readmit(turn, path, step, now, response_id, records_rows=self.records_experts)
        self._in_flight[index] = admission
        return admission

    def abandon(self, index: int) -> None:
        """Note that the client left."""
        if index in self._in_flight:
            self._abandoned.add(index)

    def is_in_flight(self, index: int) -> bool:
        """Return True while the turn has no outcome."""
        return index in self._in_flight

    def forfeit(self, index: int) -> None:
        """Drop a turn that a bug left without outcome."""
        admission = self._in_flight.pop(index, None)
        self._abandoned.discard(index)
        # A continued turn keeps its earlier outcome.
        if admission is None or admission.prior is not None:
            return
        if self._latest_with_body.get(admission.request.digest) == index:
            del self._latest_with_body[admission.request.digest]  # a retry starts a new turn

    def record(self, turn: Turn) -> NewOutput:
        """Add a turn's durable outcome; return its ledger entry."""
        known = self._tree.answered_as(turn.notes.response_id)
        assert known is None or known.index == turn.index, "an id has one answer, which its client continues from"
        self.phase = advance(self.phase, Command.COMMIT)
        admission = self._in_flight.pop(turn.index)
        self._abandoned.discard(turn.index)
        prior = admission.prior
        new = NewOutput(
            turn.sampled_tokens - (0 if prior is None else prior.sampled_tokens),
            Unknown.of(turn.unknown) - Unknown.of(() if prior is None else prior.unknown),
        )
        self._generated += new.sampled
        # Only now can it be extended: a turn that the store lacks has no children (I9).
        self._tree.add(turn, admission.path.extend(turn.output_ids))
        self._plan = None
        self._waiting.note(turn)
        return new

    def waiting_for(self, version: int) -> Set[int]:
        """Return turns that may wait for `version` (I7)."""
        return self._waiting.waiting_for(version)

    @property
    def awaited_versions(self) -> list[int]:
        """Versions that tokens may wait for."""
        return self._waiting.versions

    def scoring_start(self, leaf: int | None, version: int, is_comparable: IsComparable) -> int | None:
        """Return the first position to score when `leaf` continues; None if no token waits."""
        return scoring_start(self._waiting_in_branch(leaf, version, is_comparable), version)

    def take_scores(self, leaf: int | None, scoring: PromptLogprobs, is_comparable: IsComparable) -> list[Turn]:
        """Apply `scoring` to a branch; return changed turns (I7). Raise `UnknownWeightVersion`."""
        # Turns in flight are skipped: their own outcome brings their scores.
        version = version_of(scoring)
        changed = score_turns(self._waiting_in_branch(leaf, version, is_comparable), scoring)
        self.replace_turns(changed)
        for turn in changed:
            self._waiting.forget_met(turn, version)
        return changed

    def replace_turns(self, turns: Sequence[Turn]) -> None:
        """Replace recorded turns by copies with other columns."""
        self._plan = None
        for turn in turns:
            self._tree.replace(turn)

    def mark_delivered(self, index: int, *, delivered: bool = True) -> Turn:
        """Note whether the client got the answer."""
        self._plan = None
        return self._tree.mark_delivered(index, delivered=delivered)

    def refuse(self, error: HarnessError) -> None:
        """Count a failed model call."""
        # Once the agent has ended, an error does not explain why it stopped.
        if self.phase is not Phase.ENDED:
            self.refusals[error.code] += 1

    def drain(self) -> bool:
        """Refuse further turns for good. Return False if unchanged."""
        return self._command(Command.DRAIN)

    def end(self) -> bool:
        """Refuse further turns: the agent ended. Return False if unchanged."""
        return self._command(Command.END)

    def close(self, reason: CloseReason = CloseReason.DELETED) -> bool:
        """Close the session; the first reason stands. Return False if unchanged."""
        self.closed_because = self.closed_because or reason
        return self._command(Command.CLOSE)

    def restore(self, turn: Turn) -> None:
        """Add a stored turn, in order of admission."""
        self._count(turn.index, turn.key, turn.ordinal)
        if turn.notes.inherited and not turn.notes.asked_again:
            self._unasked[turn.key] = (*self._unasked.get(turn.key, ()), turn.index)
        else:
            self._latest_with_body[turn.request_digest] = turn.index
            self.digest_kinds.add(digest_kind(turn.request_digest))
        self._generated += 0 if turn.notes.inherited else turn.sampled_tokens
        self._waiting.note(turn)
        self._plan = None
        self._tree.add(turn, self._tree.path(turn.parent).extend(turn.context_ids).extend(turn.output_ids))

    def doubt_deliveries(self) -> list[int]:
        """Mark the last answers undelivered; return changed turns."""
        # After a restart, a turn that was extended was read. Any other may not have been, so a retry gets its answer
        # (I5).
        unasked = {index for indices in self._unasked.values() for index in indices}
        extended = {turn.parent for turn in self.turns if turn.index not in unasked}
        doubtful = [turn.index for turn in self.turns if turn.delivered and turn.index not in extended]
        for index in doubtful:
            self.mark_delivered(index, delivered=False)
        return doubtful

    def snapshot(self) -> Self:
        """Return a frozen copy for another thread."""
        # Token columns are shared, because they never change.
        frozen = copy(self)
        frozen._tree = self._tree.snapshot()  # noqa: SLF001  # the copy is of this class
        frozen._in_flight = dict(self._in_flight)  # noqa: SLF001
        frozen.refusals = self.refusals.copy()
        return frozen

    def put_rows(self, rows: Mapping[int, RecordedRows]) -> None:
        """Add the rows, by turn, that only the store has. Raise `StoreError` if one of a finished turn is missing."""
        for turn in self.turns:
            if turn.rows is None and turn.masks is None and turn.is_usable and self.has_rows(turn):
                if turn.index not in rows:
                    raise StoreError(
                        f"turn {turn.index} of session {self.session_id} has no rows in the store; collect it again,"
                        " from its successor if it was taken over"
                    )
                kept = rows[turn.index]
                self._tree.replace(structs.replace(turn, rows=kept.experts, masks=kept.masks))
        self._plan = None

    @property
    def sampled(self) -> int:
        """Generated tokens of the ledger."""
        return self._generated

    def plan(self) -> DeliveryPlan:
        """Return what the trainer would get now."""
        if self._plan is None:
            config = self.config
            requires_rows = config.missing_rows is MissingRowsPolicy.REQUIRE
            self._plan = plan_delivery(self.turns, config.selection, config.trained_roles, requires_rows=requires_rows)
        return self._plan

    def ledger(self) -> Ledger:
        config = self.config
        return account(self.turns, self._generated, self.plan(), config.left_behind, config.unknown_left_behind)

    def samples(self, live_version: int | None = None) -> list[Sample]:
        """Return what a trainer would get now."""
        metadata = {**self.config.metadata, "session_id": self.session_id}
        teachers = {name: self.untaught.get(name, "") for name in self.config.teachers or ()}
        return build_samples(self.plan(), metadata, live_version, teachers)

    def prompt_ids(self, turn: Turn) -> TokenIds:
        return self._tree.path(turn.index).ids[: turn.prompt_length]

    def _treatment(self, digest: str, says_retry: bool) -> tuple[Treatment, int]:
        index = self._latest_with_body.get(digest, -1)
        if index < 0:
            found = RetryStanding.UNKNOWN
        elif index in self._in_flight:
            found = RetryStanding.ABANDONED if index in self._abandoned else RetryStanding.AWAITED
        else:
            found = standing(self._tree.turn(index))
        return TREATMENTS[found, says_retry], index

    def _waiting_in_branch(self, leaf: int | None, version: int, is_comparable: IsComparable) -> list[Turn]:
        candidates = self._waiting.waiting_for(version)
        if not candidates:
            return []
        indices = candidates - self._in_flight.keys()
        return [turn for turn in self.branch(leaf) if turn.index in indices and is_comparable(turn)]

    def _step(self, index: int | None) -> Step | None:
        return None if index is None or self.config.script is None else self.config.script[index]

    def _require_open(self) -> None:
        if not self.is_open:
            raise SessionClosing(f"the session is {self.phase} and accepts no further turn")

    def _count(self, index: int, key: ChainKey, ordinal: int) -> None:
        self._admitted = max(self._admitted, index + 1)
        self._asked[key] = max(self._asked[key], ordinal + 1)

    def _command(self, command: Command) -> bool:
        before, self.phase = self.phase, advance(self.phase, command)
        return self.phase is not before
