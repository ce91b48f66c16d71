"""Check the ledger (I4) against the engines' token counters.

Engines count tokens where they sample them, for all users. They may count up to the ledger's `unknown` more; any other
difference is unexplained. A counter is valid only if its engine was present throughout, did not restart, and had no
other user. Otherwise the run reports the unconfirmed tokens and the reason.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from harness.engines.base import EngineCount
from harness.sessions.ledger import Ledger
from harness.suite.judge.verdicts import Verdict
from harness.types import Json

_NOBODY_ASKED = "engines were not read at the end: the run continues, was killed or failed, or is of an earlier version"


class Look(NamedTuple):
    """Engine counters and ledger at one moment."""

    engines: Mapping[str, EngineCount]
    generated: int
    unknown: int
    """Upper bound of sampled but unreported tokens."""
    server_kills: int = 0
    problem: str = ""
    """Reason for missing counters, else empty."""


class TokenReading(msgspec.Struct, frozen=True, kw_only=True):
    """Difference of two looks."""

    engines: str
    generated: int
    unknown: int
    """Upper bound of tokens missing in `generated`."""
    counted: int = 0
    """Tokens by the engines' counters, without `scored`."""
    scored: int = 0
    """Tokens sampled only to score input."""
    uncounted: int = 0
    """Requests missing in `counted`."""
    reason: str = ""
    """Reason that `counted` is invalid, else empty."""

    @property
    def difference(self) -> int:
        """Tokens counted but not in the ledger."""
        return self.counted - self.generated

    @property
    def agrees(self) -> bool:
        """True if `unknown` covers the difference."""
        return not self.reason and 0 <= self.difference <= self.unknown

    @property
    def may_change(self) -> bool:
        """True if counters may lag."""
        return not self.agrees and (not self.reason or self.uncounted > 0)


def hear(engines: str, before: Look, after: Look) -> TokenReading:
    """Compare two looks at the same engines."""
    generated = after.generated - before.generated
    unknown = after.unknown - before.unknown
    reason = before.problem or after.problem or _objection(before.engines, after.engines)
    if reason:
        return TokenReading(engines=engines, generated=generated, unknown=unknown, reason=reason)
    pairs = [(before.engines[name], now) for name, now in after.engines.items()]
    scored = sum(now.scored - then.scored for then, now in pairs)
    reading = TokenReading(
        engines=engines,
        generated=generated,
        unknown=unknown + sum(now.scored_unheard - then.scored_unheard for then, now in pairs),
        counted=sum(now.tokens - then.tokens for then, now in pairs) - scored,
        scored=scored,
        uncounted=sum(now.uncounted - then.uncounted for then, now in pairs),
    )
    if reading.uncounted and (reading.difference or reading.unknown):  # unknown tokens may offset uncounted ones
        reason = f"the engines have not counted {reading.uncounted} of their requests"
    elif after.server_kills > before.server_kills and not reading.agrees:
        reason = "the session server was killed, and did not record its requests of that moment"
    return msgspec.structs.replace(reading, reason=reason)


def _objection(before: Mapping[str, EngineCount], after: Mapping[str, EngineCount]) -> str:
    for name in sorted({*before} ^ {*after}):
        return f"{(before.get(name) or after[name]).engine} was present for part of the time only"
    for name, now in after.items():
        then, engine = before[name], now.engine
        if not now.start:
            return f"{engine} does not report when its counters started"
        if now.start != then.start or now.tokens < then.tokens:
            return f"{engine} was restarted, or left its pool for a while"
        requests, own = now.requests - then.requests, now.own_requests - then.own_requests
        if requests > own:
            return f"{engine} had {requests} requests that could sample, and this run sent {own} of them"
    return ""


class Unwitnessed(NamedTuple):
    """Ledger tokens that no counter confirms."""

    tokens: int
    reason: str


@dataclass(frozen=True, slots=True)
class Witness:
    """Comparison of ledger and engine counters."""

    heard: Sequence[TokenReading]
    unwitnessed: Sequence[Unwitnessed]

    @classmethod
    def of(cls, readings: Iterable[TokenReading], ledger: Ledger) -> "Witness":
        """Compare readings with the run's `ledger`."""
        every = list(readings)
        unwitnessed = [Unwitnessed(each.generated, each.reason) for each in every if each.reason]
        missing = ledger.generated - sum(each.generated for each in every)
        if missing:
            unwitnessed.append(Unwitnessed(missing, _NOBODY_ASKED))
        return cls([each for each in every if not each.reason], unwitnessed)

    @property
    def counted(self) -> int:
        return sum(each.counted for each in self.heard)

    @property
    def scored(self) -> int:
        return sum(each.scored for each in self.heard)

    @property
    def generated(self) -> int:
        """Comparable tokens of the ledger."""
        return sum(each.generated for each in self.heard)

    @property
    def difference(self) -> int | None:
        """Tokens that only engines count; None if not comparable."""
        return self.counted - self.generated if self.heard else None

    @property
    def agrees(self) -> bool | None:
        """True if `unknown` covers all differences; None if not comparable."""
        return all(each.agrees for each in self.heard) if self.heard else None

    @property
    def words(self) -> str:
        lines = []
        if self.heard:
            scored = f" and {self.scored:,} to score" if self.scored else ""
            lines.append(f"engines counted {self.counted:,}{scored}, ledger {self.generated:,}; {self._verdict}")
        lines += [f"not comparable: {each.tokens:,} tokens, because {each.reason}" for each in self.unwitnessed]
        return "; ".join(lines) or "nothing was sampled"

    @property
    def _verdict(self) -> str:
        if not self.agrees:
            return f"difference {self.difference:,}, unexplained"
        unknown = sum(each.unknown for each in self.heard)
        return f"difference {self.difference:,}" + (f" of at most {unknown:,} unknown" if unknown else "")

    def to_json(self) -> Json:
        return {
            "engines": self.counted if self.heard else None,
            "scored": self.scored,
            "ledger": self.generated,
            "difference": self.difference,
            "agrees": self.agrees,
            "not_comparable": [each._asdict() for each in self.unwitnessed],
        }


def judge_witness(readings: Iterable[TokenReading]) -> Iterator[Verdict]:
    """Decide whether counters confirm the ledger, if comparable."""
    heard = [each for each in readings if not each.reason]
    if heard:
        witness = Witness(heard, ())
        yield Verdict("expect_witness_agrees", "no unexplained difference", witness.words, bool(witness.agrees))
