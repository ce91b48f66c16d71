"""One session: what it was given, what it has recorded, and what it lets happen next.

The heart of the sans-IO core. The server asks what a request means (`treatment`), finds its place (`attach`), encodes
what is new, admits the turn (`admit`, or `take_up` for one that broke off), has the engine sample, makes the outcome
durable (`sessions.turn_outcome`), and records it (`record`). Between these steps anything may happen to the session:
each step decides by the state it finds and either changes everything or nothing. No method waits, so a single-threaded
shell needs no lock; another thread reads a `snapshot`.
"""

from collections import Counter
from collections.abc import Callable, Sequence, Set
from copy import copy
from typing import NamedTuple, Self

from harness.errors import BranchEnded, HarnessError, SessionClosing
from harness.samples.delivery import DeliveryPlan, plan_delivery
from harness.samples.merge import build_samples
from harness.samples.proximal import oldest_version, score_turns, scoring_start
from harness.samples.versions import version_of
from harness.sessions.admission import TurnPlace, plan_sampling, require_fresh
from harness.sessions.divergence import Divergence, find_divergence, find_other_tools, find_overlooked
from harness.sessions.ledger import Ledger, NewOutput, Unknown, account
from harness.sessions.lifecycle import TRANSITIONS, CloseReason, Command, Phase, advance
from harness.sessions.retries import TREATMENTS, Standing, Treatment, digest_kind, standing
from harness.sessions.script import Step, next_step
from harness.sessions.session_config import AfterIncomplete, SessionConfig
from harness.sessions.tree import AttachPoint, TurnTree
from harness.sessions.turn_outcome import Admission, TurnRequest, readmit
from harness.sessions.weights.waiting import WaitingTurns
from harness.tokens.history import History, Prefix
from harness.tokens.matching import ChainKey, normal_form
from harness.turn_ends import TurnStatus
from harness.types import Json, Message, PromptLogprobs, Sample, TokenIds, Turn, VersionSpan

IsComparable = Callable[[Turn], bool]
"""Whether the logprobs of a turn are on the scale on which an engine scores its input."""


class KnownAnswer(NamedTuple):
    """An answer that has its id."""

    turn: int
    """The index of its turn."""
    response_id: str


class Session:
    """State of one session; see the module's text for the order of calls."""

    def __init__(self, session_id: str, api_key: str, config: SessionConfig, created_at: float) -> None:
        self.session_id = session_id
        self.api_key = api_key
        self.config = config
        self.created_at = created_at
        self.phase = Phase.OPEN
        self.closed_because: CloseReason | None = None
        """None until it is closed."""
        self.refusals: Counter[str] = Counter()
        """Model calls that were answered with an error, by its code; they tell why an agent stopped."""
        self.normal_form = normal_form(config.matching)
        """The part of a message that counts when histories are compared."""
        self.history = History(self.normal_form)
        """The conversations that it was sent, for whoever reads the next one."""
        self._tree = TurnTree(self.normal_form)
        self._generated = config.left_behind
        self._in_flight: dict[int, Admission] = {}
        self._admitted = 0
        self._asked: Counter[ChainKey] = Counter()
        self._latest_with_body: dict[str, int] = {}
        self.digest_kinds: set[str] = set()
        """How the digests of restored turns were made (`retries.digest_kind`)."""
        self._abandoned: set[int] = set()
        self._waiting = WaitingTurns()
        self._tools: tuple[Json, ...] | None = None  # of the turn that was admitted last; a restart forgets them
        self._plan: DeliveryPlan | None = None  # of the turns as they are; None when one has changed since

    @property
    def is_open(self) -> bool:
        """Turns may start, and go on."""
        return (self.phase, Command.ADMIT) in TRANSITIONS

    @property
    def is_drained(self) -> bool:
        """Its rollout was aborted: a turn that is cut short is ABORTED, and trained as far as it came."""
        return self.phase is Phase.CLOSING

    @property
    def turns(self) -> Sequence[Turn]:
        """Recorded turns, in order of admission."""
        return self._tree.turns

    @property
    def lasted(self) -> tuple[float, float] | None:
        """Unix seconds at which the first of its calls came and the last of its turns ended; None without turns."""
        turns = self.turns
        return (min(turn.asked_at for turn in turns), max(turn.ended_at for turn in turns)) if turns else None

    @property
    def turns_in_flight(self) -> Sequence[Admission]:
        """Admitted turns without an outcome."""
        return list(self._in_flight.values())

    def known_digest(self, digest: str, older: Sequence[str], dialect: str) -> str:
        """The digest by which the session knows a call in `dialect`: `digest`, or an `older` one that a turn has."""

        def has(each: str) -> bool:
            index = self._latest_with_body.get(each)
            if index is None:
                return False
            admission = self._in_flight.get(index)
            notes = admission.request.notes if admission else self._tree.turn(index).notes
            return bool(notes.get("dialect", dialect) == dialect)  # the oldest stores do not say it

        return next(filter(has, older), digest)

    def treatment(self, digest: str, *, says_retry: bool) -> tuple[Treatment, int]:
        """How a request with that body digest is treated, and the turn it is about (-1 for none).

        Raises `SessionClosing`.
        """
        self._require_open()
        return self._treatment(digest, says_retry)

    def known_answer(self, digest: str, *, says_retry: bool) -> KnownAnswer | None:
        """The answer that a request with that body digest asks for again, as it looks now; None for one of its own."""
        treatment, index = self._treatment(digest, says_retry)
        if treatment not in (Treatment.REPLAY, Treatment.JOIN):
            return None
        admission = self._in_flight.get(index)
        known = self._tree.turn(index).notes.get("response_id") if admission is None else admission.response_id
        return None if known is None else KnownAnswer(index, known)

    def turns_until(self, response_id: str) -> list[Turn]:
        """The turns from the root to the one that was answered under that id; none when there is no such answer."""
        turn = self._tree.answered_as(response_id)
        return [] if turn is None else self.branch(turn.index)

    def answered_as(self, response_id: str) -> Turn | None:
        """The turn that was answered under that id; None when there is none."""
        return self._tree.answered_as(response_id)

    def caller(self, call_id: str) -> Turn | None:
        """The turn that made the tool call with that id; None when there is none."""
        return self._tree.caller(call_id)

    def serves(self, turn: Turn) -> bool:
        """An agent may read the answer of that turn (I2)."""
        return turn.is_usable and (
            turn.status is not TurnStatus.ABORTED or self.config.after_incomplete is AfterIncomplete.SERVE
        )

    def attach(self, prefixes: Sequence[Prefix], messages: Sequence[Message]) -> AttachPoint:
        """Where a request with these `prefixes` and `messages` continues.

        Raises `TurnRefused` when the session is not open or the branch may not be extended.
        """
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
        """The recorded turn with that index."""
        return self._tree.turn(index)

    def branch(self, index: int | None) -> list[Turn]:
        """The turns from the root to the one with that index; none for None."""
        return list(self._tree.ancestry(index))[::-1]

    def require_fresh(self, parent: int | None, live: int | None, output: Sequence[VersionSpan] = ()) -> None:
        """Raises `LimitReached` when a turn is too old to go on under the version `live`.

        It stands behind the turn `parent`, and has `output` by now. Nothing is too old while nobody knows what is live.
        """
        if self.config.limits.staleness is not None and live is not None:
            spans = [*output, *(span for turn in self.branch(parent) for span in turn.version_spans)]
            require_fresh(self.config.limits, oldest_version(spans), live)

    def script_step(self, point: AttachPoint) -> int | None:
        """The step of its script that a turn at `point` says; None without a script. Raises `ScriptEnded`."""
        if self.config.script is None:
            return None
        return next_step(self.config.script, None if point.parent is None else self._tree.turn(point.parent))

    def divergence(
        self, point: AttachPoint, messages: Sequence[Message], tools: Sequence[Json] = ()
    ) -> Divergence | None:
        """Where a request with `messages` at `point` leaves the way of an earlier one; None when it does not.

        Of several earlier ones it is the one that it follows longest. With other `tools` than the request before had it
        can go on from nowhere.
        """
        if point.parent is None and self._tools is not None and (found := find_other_tools(self._tools, tools)):
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

    def loose_matches(self, point: AttachPoint, messages: Sequence[Message], known: int) -> list[Divergence]:
        """How a request with `messages` at `point` spells otherwise what it continues.

        In the answer that it goes on from, and in what else of the branch comes behind the first `known` messages.
        """
        numbers = range(min(known, point.matched - 1), point.matched)
        return find_overlooked(self._tree.ancestry(point.parent), messages, numbers)

    def admit(self, point: AttachPoint, request: TurnRequest, context_length: int, now: float) -> Admission:
        """Start a turn on an engine whose context holds `context_length` tokens.

        Raises `TurnRefused` or `PromptTooLong` and changes nothing.
        """
        before = self._tree.path(point.parent)
        ordinal = self._asked[point.key]
        place = TurnPlace(self._admitted, before.length + request.context_ids.size, point.key, ordinal)
        self._require_open()
        params = plan_sampling(request.asked, self.config.sampling, self.config.limits, place, context_length)
        step = self._step(request.script_step)
        if step is not None:
            params = step.plan(params)
        path = before.extend(request.context_ids)
        admission = Admission(self._admitted, point.parent, point.key, ordinal, path, request, params, now, step=step)
        self._in_flight[admission.index] = admission
        self._tools = request.tools
        self._count(admission.index, point.key, ordinal)
        self._latest_with_body[request.digest] = admission.index
        return admission

    def take_up(self, index: int, now: float, response_id: str) -> Admission:
        """Go on with a turn that broke off, under its own index, parameters and seed; its answer has that id.

        Raises `SessionClosing`.
        """
        self._require_open()
        turn = self._tree.turn(index)
        path, step = self._tree.path(index).cut(turn.prompt_length), self._step(turn.script_step)
        admission = readmit(turn, path, step, now, {"response_id": response_id})
        self._in_flight[index] = admission
        return admission

    def abandon(self, index: int) -> None:
        """Note that the client of a turn in flight has left."""
        if index in self._in_flight:
            self._abandoned.add(index)

    def is_in_flight(self, index: int) -> bool:
        """That turn is admitted and has no outcome."""
        return index in self._in_flight

    def forfeit(self, index: int) -> None:
        """Let go of a turn in flight that a bug of ours has kept from an outcome; nothing for one that has its own."""
        admission = self._in_flight.pop(index, None)
        self._abandoned.discard(index)
        if admission is None or admission.prior is not None:
            return
        if self._latest_with_body.get(admission.request.digest) == index:
            del self._latest_with_body[admission.request.digest]  # its retry is a turn of its own

    def record(self, turn: Turn) -> NewOutput:
        """Take in the outcome of an admitted turn, once it is durable; returns what it adds to the ledger.

        Only now can it be extended: what the store does not have has no children (I9).
        """
        known = self._tree.answered_as(turn.notes.get("response_id", ""))
        assert known is None or known.index == turn.index, "an id has one answer, which its client goes on from"
        self.phase = advance(self.phase, Command.COMMIT)
        admission = self._in_flight.pop(turn.index)
        self._abandoned.discard(turn.index)
        prior = admission.prior
        new = NewOutput(
            turn.sampled_tokens - (0 if prior is None else prior.sampled_tokens),
            Unknown.of(turn.unknown) - Unknown.of(() if prior is None else prior.unknown),
        )
        self._generated += new.sampled
        self._tree.add(turn, admission.path.extend(turn.output_ids))
        self._plan = None
        self._waiting.note(turn)
        return new

    def waiting_for(self, version: int) -> Set[int]:
        """Indices of the turns that may have tokens that wait for the policy version `version`; cheap to ask (I7)."""
        return self._waiting.waiting_for(version)

    @property
    def awaited_versions(self) -> list[int]:
        """The policy versions that some of its tokens may wait for (I7)."""
        return self._waiting.versions

    def scoring_start(self, leaf: int | None, version: int, is_comparable: IsComparable) -> int | None:
        """Where a request that goes on from turn `leaf` has to begin scoring under `version`; None: nothing waits."""
        return scoring_start(self._waiting_in_branch(leaf, version, is_comparable), version)

    def take_scores(self, leaf: int | None, scoring: PromptLogprobs, is_comparable: IsComparable) -> list[Turn]:
        """Take what `scoring` settles in the branch that ends with turn `leaf`; returns the turns it changed (I7).

        Turns in flight are left alone: their own outcome brings their scores. Raises `UnknownWeightVersion`.
        """
        version = version_of(scoring)
        changed = score_turns(self._waiting_in_branch(leaf, version, is_comparable), scoring)
        self._plan = None
        for turn in changed:
            self._tree.replace(turn)
            self._waiting.forget_met(turn, version)
        return changed

    def mark_delivered(self, index: int, *, delivered: bool = True) -> Turn:
        """Note that the answer of a turn has been handed over completely, or that it turned out not to be."""
        self._plan = None
        return self._tree.mark_delivered(index, delivered=delivered)

    def refuse(self, error: HarnessError) -> None:
        """Count a model call that was answered with `error`; once the agent has ended, it says nothing of why."""
        if self.phase is not Phase.ENDED:
            self.refusals[error.code] += 1

    def drain(self) -> bool:
        """Accept no further turn, for good; False when that was so before."""
        return self._command(Command.DRAIN)

    def end(self) -> bool:
        """Accept no further turn, because the agent has ended; False when that was so before."""
        return self._command(Command.END)

    def close(self, reason: CloseReason = CloseReason.DELETED) -> bool:
        """End the session for its owner; False when it was closed before, and the reason of then stands."""
        self.closed_because = self.closed_because or reason
        return self._command(Command.CLOSE)

    def restore(self, turn: Turn) -> None:
        """Add a turn read back from the store; turns come in order of their admission."""
        self._count(turn.index, turn.key, turn.ordinal)
        self._latest_with_body[turn.request_digest] = turn.index
        self.digest_kinds.add(digest_kind(turn.request_digest))
        self._generated += turn.sampled_tokens
        self._waiting.note(turn)
        self._plan = None
        self._tree.add(turn, self._tree.path(turn.parent).extend(turn.context_ids).extend(turn.output_ids))

    def doubt_deliveries(self) -> list[int]:
        """After a restart: nobody knows whether the last answers were read before the server died.

        A turn that has been extended was read. Any other counts as undelivered, so that a retry gets its answer (I5).
        Returns the turns that had been noted as read.
        """
        extended = {turn.parent for turn in self.turns}
        doubtful = [turn.index for turn in self.turns if turn.delivered and turn.index not in extended]
        for index in doubtful:
            self.mark_delivered(index, delivered=False)
        return doubtful

    def snapshot(self) -> Self:
        """A copy that stays as it is now, for a reader in another thread; shares the token columns."""
        frozen = copy(self)
        frozen._tree = self._tree.snapshot()  # noqa: SLF001  # the copy is of this class
        frozen._in_flight = dict(self._in_flight)  # noqa: SLF001
        frozen.refusals = self.refusals.copy()
        return frozen

    @property
    def sampled(self) -> int:
        """Tokens sampled for its recorded turns, wherever they went: what its ledger calls generated."""
        return self._generated

    def plan(self) -> DeliveryPlan:
        """What would reach the trainer, were the samples collected now."""
        if self._plan is None:
            self._plan = plan_delivery(self.turns, self.config.selection, self.config.trained_roles)
        return self._plan

    def ledger(self) -> Ledger:
        """Where the tokens sampled so far would go, were the samples collected now."""
        config = self.config
        return account(self.turns, self._generated, self.plan(), config.left_behind, config.unknown_left_behind)

    def samples(self, live_version: int | None = None) -> list[Sample]:
        """The samples that a trainer would get, were they collected now, under `live_version` where that is known."""
        metadata = {**self.config.metadata, "session_id": self.session_id}
        return build_samples(self.plan(), metadata, live_version)

    def prompt_ids(self, turn: Turn) -> TokenIds:
        """The whole prompt of a recorded turn."""
        return self._tree.path(turn.index).ids[: turn.prompt_length]

    def _treatment(self, digest: str, says_retry: bool) -> tuple[Treatment, int]:
        index = self._latest_with_body.get(digest, -1)
        if index < 0:
            found = Standing.UNKNOWN
        elif index in self._in_flight:
            found = Standing.ABANDONED if index in self._abandoned else Standing.AWAITED
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
