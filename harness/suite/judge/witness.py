"""The outside witness of the ledger (I4): what the engines of a run say that they have sampled, by their own counters.

The ledger knows of the tokens that reached it. An engine counts tokens where it samples them, for whoever asked, and
knows nothing of turns. On an undisturbed run the two are equal; what a disturbed one has lost on the way is between 0
and the ledger's `unknown`. Any other difference is said, and nothing explains it.

A counter speaks only for an engine that was there all the time, was not started anew, and had no other user. Where that
does not hold, or cannot be told, there is no number: the run says how many tokens nobody bears out, and why.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from harness.engines.base import EngineCount
from harness.sessions.ledger import Ledger
from harness.suite.judge.verdicts import Verdict
from harness.types import Json

_NOBODY_ASKED = "their engines were not asked again: the run goes on, was killed, failed, or is of an earlier version"


class Look(NamedTuple):
    """The counters of engines and the ledger of their run at one moment."""

    engines: Mapping[str, EngineCount]
    """By the name of the worker."""
    generated: int
    """Tokens in the ledger."""
    unknown: int
    """The most that engines can have kept for themselves."""
    server_kills: int = 0
    """How often a fault has killed the session server, which then leaves no word about the requests of that moment."""
    problem: str = ""
    """Why there are no counters; empty when there are."""


class Hearing(msgspec.Struct, frozen=True, kw_only=True):
    """The difference of two looks: what the engines have sampled between them, and what the ledger got."""

    engines: str
    """The name of the choice of engines, as in `lock.json`."""
    generated: int
    unknown: int
    """The most that can be missing in `generated`."""
    counted: int = 0
    """By the engines, without `scored`."""
    scored: int = 0
    """Tokens that engines had to sample to score their input."""
    uncounted: int = 0
    """Requests that are not in `counted`."""
    reason: str = ""
    """Why `counted` says nothing; empty when it does."""

    @property
    def difference(self) -> int:
        """The tokens that engines have sampled and the ledger has not."""
        return self.counted - self.generated

    @property
    def agrees(self) -> bool:
        """The difference is what can be unknown."""
        return not self.reason and 0 <= self.difference <= self.unknown

    @property
    def may_change(self) -> bool:
        """Counters may be a moment behind the replies: another look can tell more."""
        return not self.agrees and (not self.reason or self.uncounted > 0)


def hear(engines: str, before: Look, after: Look) -> Hearing:
    """What the two looks at the same engines come to."""
    generated = after.generated - before.generated
    unknown = after.unknown - before.unknown
    reason = before.problem or after.problem or _objection(before.engines, after.engines)
    if reason:
        return Hearing(engines=engines, generated=generated, unknown=unknown, reason=reason)
    pairs = [(before.engines[name], now) for name, now in after.engines.items()]
    scored = sum(now.scored - then.scored for then, now in pairs)
    hearing = Hearing(
        engines=engines,
        generated=generated,
        unknown=unknown + sum(now.scored_unheard - then.scored_unheard for then, now in pairs),
        counted=sum(now.tokens - then.tokens for then, now in pairs) - scored,
        scored=scored,
        uncounted=sum(now.uncounted - then.uncounted for then, now in pairs),
    )
    if hearing.uncounted and (hearing.difference or hearing.unknown):  # what they kept may make up for what they forgot
        reason = f"the engines have not counted {hearing.uncounted} of their requests"
    elif after.server_kills > before.server_kills and not hearing.agrees:
        reason = "the session server was killed, and left no word about the requests of that moment"
    return msgspec.structs.replace(hearing, reason=reason)


def _objection(before: Mapping[str, EngineCount], after: Mapping[str, EngineCount]) -> str:
    """Why the counters cannot be held against the ledger; empty when they can."""
    for name in sorted({*before} ^ {*after}):
        return f"{(before.get(name) or after[name]).engine} was there for a part of the time only"
    for name, now in after.items():
        then, engine = before[name], now.engine
        if not now.start:
            return f"{engine} does not say since when it counts"
        if now.start != then.start or now.tokens < then.tokens:
            return f"{engine} was started anew, or left its pool for a while"
        requests, own = now.requests - then.requests, now.own_requests - then.own_requests
        if requests > own:
            return f"{engine} had {requests} requests that could sample, and this run sent {own} of them"
    return ""


class Unwitnessed(NamedTuple):
    """Tokens of the ledger that no counter bears out."""

    tokens: int
    reason: str


@dataclass(frozen=True, slots=True)
class Witness:
    """What the engines of a run say of its ledger."""

    heard: Sequence[Hearing]
    """Those that can be compared."""
    unwitnessed: Sequence[Unwitnessed]

    @classmethod
    def of(cls, hearings: Iterable[Hearing], ledger: Ledger) -> "Witness":
        """The hearings of a run whose ledger is `ledger`."""
        every = list(hearings)
        unwitnessed = [Unwitnessed(each.generated, each.reason) for each in every if each.reason]
        missing = ledger.generated - sum(each.generated for each in every)
        if missing:
            unwitnessed.append(Unwitnessed(missing, _NOBODY_ASKED))
        return cls([each for each in every if not each.reason], unwitnessed)

    @property
    def counted(self) -> int:
        """Tokens that the engines have sampled for sessions, as they say."""
        return sum(each.counted for each in self.heard)

    @property
    def scored(self) -> int:
        """Tokens that they had to sample besides, to score their input."""
        return sum(each.scored for each in self.heard)

    @property
    def generated(self) -> int:
        """Tokens that the ledger has of the same engines in the same time."""
        return sum(each.generated for each in self.heard)

    @property
    def difference(self) -> int | None:
        """The tokens that only the engines know of; None when nothing can be compared."""
        return self.counted - self.generated if self.heard else None

    @property
    def agrees(self) -> bool | None:
        """Every difference is one that the ledger calls unknown; None when nothing can be compared."""
        return all(each.agrees for each in self.heard) if self.heard else None

    @property
    def words(self) -> str:
        """One line for a reader."""
        lines = []
        if self.heard:
            scored = f" and {self.scored:,} to score" if self.scored else ""
            lines.append(f"engines counted {self.counted:,}{scored}, ledger {self.generated:,}; {self._verdict}")
        lines += [f"not comparable: {each.tokens:,} tokens, because {each.reason}" for each in self.unwitnessed]
        return "; ".join(lines) or "nothing was sampled"

    @property
    def _verdict(self) -> str:
        if not self.agrees:
            return f"difference {self.difference:,}, which nothing explains"
        unknown = sum(each.unknown for each in self.heard)
        return f"difference {self.difference:,}" + (f" of at most {unknown:,} unknown" if unknown else "")

    def to_json(self) -> Json:
        """The form of `result.json`."""
        return {
            "engines": self.counted if self.heard else None,
            "scored": self.scored,
            "ledger": self.generated,
            "difference": self.difference,
            "agrees": self.agrees,
            "not_comparable": [each._asdict() for each in self.unwitnessed],
        }


def judge_witness(hearings: Iterable[Hearing]) -> Iterator[Verdict]:
    """Whether the engines of a scenario bear out the ledger, where that can be told."""
    heard = [each for each in hearings if not each.reason]
    if heard:
        witness = Witness(heard, ())
        yield Verdict(
            "expect_witness_agrees", "no difference that nothing explains", witness.words, bool(witness.agrees)
        )
