"""What a shard is told, whatever has happened to the gate, and what it does with it."""

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from harness.errors import HarnessError
from harness.gateway.shards.shard import AT_FIRST, DesiredState, desired_state_of, mirrored
from harness.sessions.gate import Gate, GateState, Hold, HoldKind, Work

HOLDERS = st.sampled_from(["a", "b", "c"])
KINDS = st.sampled_from(HoldKind)


class ShardMachine(RuleBasedStateMachine):
    """A front whose gate moves, and a shard that is told late, twice or not at all, and dies.

    The shard's gate is a `Gate` that mirrors. A session is the last drain that its shard had heard of when it began.
    """

    def __init__(self) -> None:
        super().__init__()
        self.front = Gate()
        self.drains = 0
        self.drained = 0
        self.now = 0.0
        self.under_way: list[DesiredState] = []
        self.sessions: list[int] = []
        self.heard = 0
        self.die()

    @rule()
    def die(self) -> None:
        """The process is another one, and its sessions are as its store has them."""
        self.shard = Gate()
        self.shard.mirror(mirrored(AT_FIRST), AT_FIRST.epoch)
        self.has_carried_out = 0
        self.under_way.clear()

    @rule(holder=HOLDERS, kind=KINDS)
    def place(self, holder: str, kind: HoldKind) -> None:
        """A verb that shuts; a drain is noted before anybody hears of it."""
        try:
            self.front.place(Hold(holder, kind, self.now + 10))
        except HarnessError:
            return
        self.drains += kind is HoldKind.DRAIN

    @rule(holder=HOLDERS)
    def release(self, holder: str) -> None:
        """A verb that opens."""
        try:
            self.front.release(holder)
        except HarnessError:
            return

    @rule(seconds=st.floats(0, 20))
    def expire(self, seconds: float) -> None:
        """A holder that does not come back."""
        self.now += seconds
        self.front.expire(self.now)

    @precondition(lambda self: not self.under_way)
    @rule()
    def send(self) -> None:
        """One telling at a time is under way."""
        owes = self.drains if self.drained < self.drains else 0
        self.under_way.append(desired_state_of(self.front, owes=owes))

    @precondition(lambda self: self.under_way)
    @rule(is_heard=st.booleans())
    def arrive(self, is_heard: bool) -> None:
        """The shard does as it is told; its answer arrives or is lost."""
        standing = self.under_way.pop()
        self.shard.mirror(mirrored(standing), standing.epoch)
        if standing.drain > self.has_carried_out:
            assert all(born < standing.drain for born in self.sessions), "a drain took a session from after it"
            self.sessions.clear()
            self.has_carried_out = self.heard = standing.drain
        if is_heard and standing.drain:
            self.drained = standing.drain

    @rule()
    def create(self) -> None:
        """A session that the shard's gate lets through."""
        if self.shard.answer(Work.CREATE) == "serve":
            self.sessions.append(self.heard)

    @invariant()
    def in_step(self) -> None:
        """A shard that stands as it would be told now has the state and the epoch of the front."""
        owes = self.drains if self.drained < self.drains else 0
        wanted = desired_state_of(self.front, owes=owes)
        mirror = Gate()
        mirror.mirror(mirrored(wanted), wanted.epoch)
        assert mirror.epoch == self.front.epoch
        assert mirror.state == self.front.state or (owes and mirror.state is GateState.PAUSED)


TestShards = ShardMachine.TestCase


def test_a_shard_that_nobody_has_told_is_shut():
    """Every kind of work waits, and nothing runs out."""
    gate = Gate()
    gate.mirror(mirrored(AT_FIRST), AT_FIRST.epoch)

    assert {str(gate.answer(work)) for work in Work} == {"hold"}
    assert gate.expire(1e12) == ()


@given(st.lists(st.tuples(HOLDERS, KINDS, st.booleans()), max_size=3), st.booleans())
def test_a_mirror_answers_as_the_gate_does(holds: list[tuple[str, HoldKind, bool]], owes: bool):
    """To every kind of work; and never more than the gate, while a drain is owed."""
    gate, mirror = Gate(), Gate()
    gate.restore(Hold(holder, kind, 5.0, engines) for holder, kind, engines in holds)
    mirror.mirror(mirrored(desired_state_of(gate, owes=int(owes))), gate.epoch)

    for work in Work:
        if not owes:
            assert mirror.answer(work) == gate.answer(work)
        elif gate.state is GateState.OPEN:
            assert mirror.answer(work) == "hold"
