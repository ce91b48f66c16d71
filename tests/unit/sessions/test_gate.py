"""The holds on a gate: the strongest decides, each ends by its own holder or by its time, and by nothing else."""

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from harness.errors import EnginesHeld, HoldExpired, HoldNotFound
from harness.sessions.gate import ANONYMOUS, Gate, GateAnswer, GateState, Hold, HoldKind, Work


def pause(holder: str, until: float = 100.0, *, engines: bool = False) -> Hold:
    return Hold(holder, HoldKind.PAUSE, until, engines)


def drain(holder: str, until: float = 100.0) -> Hold:
    return Hold(holder, HoldKind.DRAIN, until)


def test_who_joins_a_hold_leaves_it_the_work_that_it_is_for():
    """A server that is started again continues with it."""
    gate = Gate()
    gate.place(replace(pause("a", engines=True), work="weights"))
    gate.place(pause("a", until=200.0))

    assert gate.holds == (Hold("a", HoldKind.PAUSE, 200.0, engines=True, work="weights"),)


def test_a_hold_that_ran_out_does_not_come_back():
    """Its holder believes that the gate has been shut all the time, and is told that it was not."""
    gate = Gate()
    gate.place(pause("a", until=10.0))
    gate.expire(11.0)

    for verb in (lambda: gate.place(pause("a")), lambda: gate.place(drain("a")), lambda: gate.release("a")):
        with pytest.raises(HoldExpired, match="another holder"):
            verb()
    assert gate.state is GateState.OPEN


@pytest.mark.parametrize("state", ["open", "paused", "draining"])
@pytest.mark.parametrize("work", [Work.TURN, Work.CONTINUATION])
def test_a_session_that_is_not_open_answers_for_itself_in_every_state(state, work):
    """It says 404; nobody holds its calls."""
    gate = Gate()
    if state != "open":
        gate.place(pause("a") if state == "paused" else drain("a"))

    assert gate.answer(work, is_open=False) is GateAnswer.SERVE


def test_one_hold_at_a_time_covers_the_engines():
    """The second updater waits; a pause that leaves the engines alone does not."""
    gate = Gate()
    gate.place(pause("first", engines=True))
    gate.place(pause("watcher"))

    with pytest.raises(EnginesHeld, match="first"):
        gate.place(pause("second", engines=True))
    gate.place(pause("first", until=200.0, engines=True))
    gate.release("first", engines_continued=True)
    gate.place(pause("second", engines=True))
    assert not gate.must_wake_engines


@pytest.mark.parametrize("ends", ["expires", "is released without a word"])
def test_engines_are_left_when_their_hold_ends_and_nobody_says_that_they_go_on(ends):
    """A holder of the gate alone does not keep them paused; one of the engines does."""
    gate = Gate()
    gate.place(pause("first", until=10.0, engines=True))
    gate.place(pause("watcher"))
    if ends == "expires":
        gate.expire(11.0)
    else:
        gate.release("first")

    assert gate.must_wake_engines
    gate.place(pause("second", engines=True))
    assert not gate.must_wake_engines
    gate.release("second", engines_continued=True)
    assert gate.must_wake_engines  # it may not have known all of them
    assert [hold.holder for hold in gate.forget_left()] == ["first"]
    assert not gate.must_wake_engines


def test_a_holder_that_comes_back_too_late_leaves_the_engines_once_more():
    """It may have paused them after they were continued, and must not continue them itself: they may be another's."""
    gate = Gate()
    gate.place(pause("late", until=10.0, engines=True))
    gate.expire(11.0)
    gate.forget_left()
    with pytest.raises(HoldExpired):
        gate.release("late", engines_continued=True)

    assert gate.must_wake_engines


def test_nobody_pauses_engines_that_are_being_continued():
    gate = Gate(wakers=1)

    with pytest.raises(EnginesHeld, match="being continued"):
        gate.place(pause("update", engines=True))


HOLDERS = st.sampled_from(["a", "b", "c", ANONYMOUS])
STEPS = st.one_of(
    st.tuples(st.sampled_from(["pause", "drain"]), HOLDERS, st.integers(1, 9)),
    st.tuples(st.just("renew"), HOLDERS, st.integers(1, 9)),
    st.tuples(st.just("release"), HOLDERS, st.just(0)),
    st.tuples(st.just("wait"), st.just(""), st.integers(1, 5)),
)


@given(st.lists(STEPS, max_size=40))
@example([("drain", "a", 9), ("pause", "b", 9), ("pause", "a", 9), ("release", "a", 0), ("release", "b", 0)])
@example([("drain", ANONYMOUS, 9), ("pause", ANONYMOUS, 9), ("release", ANONYMOUS, 0), ("release", ANONYMOUS, 0)])
@example([("pause", "a", 9), ("pause", "a", 2), ("renew", "a", 2), ("wait", "", 5), ("renew", "a", 9), ("wait", "", 4)])
@example([("pause", ANONYMOUS, 1), ("wait", "", 1), ("pause", ANONYMOUS, 1), ("release", "b", 0)])
def test_the_gate_is_shut_exactly_while_somebody_holds_it(steps):
    """Against a model that keeps, by holder, what was asked and until when at the latest."""
    gate, now, model, gone, epoch = Gate(), 0, {}, set(), 0
    for verb, holder, number in steps:
        before = gate.state
        if verb == "wait":
            now += number
            gate.expire(now)
            out = {name for name, (_, until) in model.items() if until <= now}
            gone |= out - {ANONYMOUS}
            model = {name: hold for name, hold in model.items() if name not in out}
        elif holder in gone:
            with pytest.raises(HoldExpired):
                gate.release(holder) if verb == "release" else gate.place(pause(holder, now + number))
        elif verb == "release":
            if holder in model or holder == ANONYMOUS:
                gate.release(holder)
                model.pop(holder, None)
            else:
                with pytest.raises(HoldNotFound):
                    gate.release(holder)
        elif verb == "renew" and holder not in model:
            with pytest.raises(HoldNotFound):
                gate.renew(holder, now + number)
        else:
            kind, until = model.get(holder, ("pause", 0))
            if verb == "renew":
                gate.renew(holder, now + number)
            else:
                gate.place(Hold(holder, HoldKind(verb), now + number))
            model[holder] = ("drain" if "drain" in (verb, kind) else "pause", max(until, now + number))
        epoch += gate.state is not before
        kinds = {kind for kind, _ in model.values()}
        assert gate.state == ("draining" if "drain" in kinds else "paused" if kinds else "open")
        assert {hold.holder: (hold.kind, hold.until) for hold in gate.holds} == model
        assert gate.epoch == epoch
