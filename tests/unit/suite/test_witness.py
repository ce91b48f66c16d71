"""What engines count, against the ledger: a difference that is true, or a reason why there is none."""

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from harness.engines.base import EngineCount
from harness.sessions.ledger import Ledger
from harness.suite.judge.witness import Look, TokenReading, Witness, hear


@dataclass
class Engine:
    """An engine with its counters, and everything that happens to it."""

    name: str
    start: int = 1
    tokens: int = 1000
    scored: int = 5
    scored_unheard: int = 1
    requests: int = 40
    own_requests: int = 30
    uncounted: int = 2

    def count(self) -> EngineCount:
        numbers = (self.tokens, self.scored, self.scored_unheard, self.requests, self.own_requests, self.uncounted)
        return EngineCount(self.name, str(self.start), *numbers)


@dataclass
class World:
    """Two engines and the ledger; each event is what it is called, and the truth about it is kept."""

    engines: dict[str, Engine] = field(default_factory=lambda: {name: Engine(name) for name in ("a", "b")})
    ledger: int = 300
    unknown: int = 10
    kills: int = 0
    lost: int = 0
    """Tokens that engines sampled for this run and that the ledger never got."""
    spoilt: set[str] = field(default_factory=set)

    def look(self) -> Look:
        counts = {name: engine.count() for name, engine in self.engines.items()}
        return Look(counts, self.ledger, self.unknown, self.kills)

    def answered(self, name: str, tokens: int) -> None:
        engine = self.engines[name]
        engine.requests, engine.own_requests = engine.requests + 1, engine.own_requests + 1
        engine.tokens += tokens
        self.ledger += tokens

    def broken(self, name: str, tokens: int) -> None:
        self.answered(name, tokens)
        self.ledger -= tokens
        self.lost += tokens
        self.unknown += tokens + 7

    def scored(self, name: str, tokens: int) -> None:
        engine = self.engines[name]
        engine.requests, engine.own_requests = engine.requests + 1, engine.own_requests + 1
        engine.tokens, engine.scored = engine.tokens + 1, engine.scored + 1

    def unreachable(self, name: str, tokens: int) -> None:
        self.engines[name].own_requests += 1

    def forgotten(self, name: str, tokens: int) -> None:
        self.answered(name, tokens)
        self.engines[name].tokens -= tokens
        self.engines[name].uncounted += 1
        self.spoilt.add("have not counted")

    def shared(self, name: str, tokens: int) -> None:
        self.engines[name].requests += 100
        self.engines[name].tokens += tokens
        self.spoilt.add("requests that could sample")

    def restarted(self, name: str, tokens: int) -> None:
        self.engines[name] = Engine(name, start=self.engines[name].start + 1, tokens=5000)
        self.spoilt.add("restarted")

    def left(self, name: str, tokens: int) -> None:
        self.engines = {other: engine for other, engine in self.engines.items() if other != name} or self.engines
        if len(self.engines) == 1:
            self.spoilt.add("part of the time")


HARMLESS = ("answered", "broken", "scored", "unreachable")
EVENTS = (*HARMLESS, "forgotten", "shared", "restarted", "left")


def happen(world: World, event: str, name: str, tokens: int) -> None:
    """Let something happen to an engine that is there."""
    if name in world.engines:
        getattr(world, event)(name, tokens)


@given(st.lists(st.tuples(st.sampled_from(HARMLESS), st.sampled_from("ab"), st.integers(0, 50))))
def test_the_difference_is_what_engines_kept_for_themselves(events: list[tuple[str, str, int]]) -> None:
    """Whatever broke, it is within the unknown; and 0 when nothing did."""
    world = World()
    before = world.look()
    for event in events:
        happen(world, *event)
    reading = hear("two", before, world.look())

    assert (reading.reason, reading.difference, reading.agrees) == ("", world.lost, True)
    assert reading.generated == world.ledger - before.generated


@given(st.lists(st.tuples(st.sampled_from(EVENTS), st.sampled_from("ab"), st.integers(1, 50)), max_size=6))
def test_there_is_no_wrong_number(events: list[tuple[str, str, int]]) -> None:
    """Either the difference is the true one, or a reason says what spoilt the counters."""
    world = World()
    before = world.look()
    for event in events:
        happen(world, *event)
    reading = hear("two", before, world.look())

    if reading.reason:
        assert any(words in reading.reason for words in world.spoilt)
        assert reading.counted == 0 or "have not counted" in reading.reason
    else:
        assert (reading.difference, world.spoilt) == (world.lost, set())


def test_a_token_too_many_is_said() -> None:
    """Nothing explains it, and no other engine makes up for it."""
    world = World()
    before = world.look()
    world.answered("a", 20)
    world.broken("b", 10)
    world.engines["a"].tokens += 18
    reading = hear("two", before, world.look())
    witness = Witness.of([reading], Ledger(20))

    assert (reading.difference, reading.unknown, reading.may_change) == (28, 17, True)
    assert witness.agrees is False
    assert witness.words == "engines counted 48, ledger 20; difference 28, unexplained"


def test_a_killed_session_server_leaves_no_word() -> None:
    """What it had in flight is in no column."""
    world = World()
    before = world.look()
    world.answered("a", 20)
    calm = hear("two", before, world.look()._replace(server_kills=1))
    world.engines["a"].tokens += 5
    lost = hear("two", before, world.look()._replace(server_kills=1))

    assert (calm.reason, calm.difference) == ("", 0)
    assert lost.reason == "the session server was killed, and did not record its requests of that moment"


def test_an_engine_that_tells_no_time_is_not_believed() -> None:
    """It may have been restarted without a sign."""
    timeless = Look({"a": EngineCount("sglang at x", "", 10)}, 0, 0)

    assert hear("one", timeless, timeless).reason == "sglang at x does not report when its counters started"


def test_tokens_that_nobody_bears_out_are_said() -> None:
    """Those of engines that say nothing, and those of a run that was killed before it asked them."""
    heard = TokenReading(engines="x", generated=30, unknown=0, counted=30, scored=2)
    mute = TokenReading(engines="y", generated=12, unknown=0, reason="its engine is gone")
    witness = Witness.of([heard, mute], Ledger(50))

    assert (witness.counted, witness.generated, witness.difference, witness.agrees) == (30, 30, 0, True)
    assert [each.tokens for each in witness.unwitnessed] == [12, 8]
    assert witness.words.startswith(
        "engines counted 30 and 2 to score, ledger 30; difference 0;"
        " not comparable: 12 tokens, because its engine is gone;"
        " not comparable: 8 tokens, because engines were not read at the end"
    )
    assert Witness.of([mute], Ledger(12)).to_json() == {
        "engines": None,
        "scored": 0,
        "ledger": 0,
        "difference": None,
        "agrees": None,
        "not_comparable": [{"tokens": 12, "reason": "its engine is gone"}],
    }
    assert Witness.of([], Ledger()).words == "nothing was sampled"
