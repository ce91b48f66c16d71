"""When holds were on a gate, as those who changed it have noted."""

from harness.sessions.gate import Hold, HoldKind
from harness.sessions.hold_times import HoldTime, HoldTimes

PAUSE = Hold("a", HoldKind.PAUSE, 100.0)
DRAIN = Hold("a", HoldKind.DRAIN, 100.0)
UPDATE = Hold("b", HoldKind.PAUSE, 100.0, engines=True)


def test_a_hold_goes_on_until_it_is_off_the_gate():
    """Renewed it is the same one; of another kind it is another one, which begins where that ended."""
    times = HoldTimes()
    times.note([PAUSE], 1.0)
    times.note([PAUSE, UPDATE], 2.0)
    times.note([UPDATE, DRAIN], 3.0)
    times.note([DRAIN], 4.0)

    assert times.since(0.0) == [
        HoldTime("a", HoldKind.PAUSE, False, 1.0, 3.0),
        HoldTime("b", HoldKind.PAUSE, True, 2.0, 4.0),
        HoldTime("a", HoldKind.DRAIN, False, 3.0, None),
    ]


def test_whoever_has_the_earlier_ones_is_told_of_the_later_ones():
    """One that ended in that moment is among them, and one that continues always."""
    times = HoldTimes()
    times.note([PAUSE], 1.0)
    times.note([UPDATE], 2.0)
    times.note([UPDATE], 3.0)

    assert [each.holder for each in times.since(2.0)] == ["a", "b"]
    assert [each.holder for each in times.since(2.1)] == ["b"]


def test_a_gate_remembers_its_last_holds():
    """Not for ever; those that are on it do not count."""
    times = HoldTimes(most=2)
    for moment in range(5):
        times.note([Hold(str(moment), HoldKind.PAUSE, 100.0)], float(moment))

    assert [each.holder for each in times.since(0.0)] == ["2", "3", "4"]


def test_a_hold_of_an_earlier_server_goes_on_or_is_over():
    times = HoldTimes()
    times.restore([HoldTime("a", HoldKind.PAUSE, False, 1.0, None), HoldTime("c", HoldKind.DRAIN, False, 0.5, None)])
    times.note([PAUSE], 9.0)

    assert [(each.holder, each.began_at, each.ended_at) for each in times.since(0.0)] == [
        ("c", 0.5, 9.0),
        ("a", 1.0, None),
    ]
