"""Which fault is due when, and what a `[[faults]]` table may say."""

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.suite.faults.engine_seam import TurnCount
from harness.suite.faults.injector import Event, Timeline
from harness.suite.scenarios.fault import ON_EVERYTHING, Fault
from harness.suite.scenarios.folder import load_scenario
from tests.harness_command import write_scenario
from tests.unit.suite.test_scenario_files import problems_of

SEEDS = {0: 11, 1: 12, 2: 13}


def _due(timeline: Timeline, *events: Event) -> list[tuple[int, Event]]:
    return [(position, event) for event in events for position in timeline.after(event)]


def test_a_fault_on_one_session_comes_once_to_each():
    timeline = Timeline([Fault(action="kill_agent", at_turn=2)], SEEDS)

    due = _due(timeline, *(Event(session, turn) for turn in (1, 2, 2, 3) for session in (0, 1)))

    assert due == [(0, Event(0, 2)), (0, Event(1, 2))]


def test_a_fault_on_everything_comes_once():
    timeline = Timeline([Fault(action="drain", at_turn=2)], SEEDS)

    assert _due(timeline, Event(1, 2), Event(0, 2), Event(2, 2)) == [(0, Event(1, 2))]


def test_only_the_named_sessions_trigger_a_fault():
    """`sessions` narrows it down."""
    timeline = Timeline([Fault(action="drain", at_turn=1, sessions=[2])], SEEDS)

    assert _due(timeline, Event(0, 1), Event(2, 1)) == [(0, Event(2, 1))]


def test_a_token_is_waited_for():
    """Not at the beginning of the turn, and with the first count that reaches it."""
    timeline = Timeline([Fault(action="cut_connection", at_turn=1, at_token=5)], SEEDS)

    due = _due(timeline, Event(0, 1), Event(0, 1, 4), Event(0, 1, 7), Event(0, 1, 8))

    assert due == [(0, Event(0, 1, 7))]
    assert timeline.counts_tokens(1, 1)
    assert not timeline.counts_tokens(1, 2)


def test_the_clock_makes_each_fault_due_once():
    """`next_second` says when to look."""
    timeline = Timeline([Fault(action="drain", at_second=second) for second in (2.0, 1)], SEEDS)

    assert timeline.next_second() == 1
    assert _due(timeline, Event(at_s=1.0)) == [(1, Event(at_s=1.0))]
    assert timeline.next_second() == 2
    assert _due(timeline, Event(at_s=5.0)) == [(0, Event(at_s=5.0))]
    assert timeline.next_second() is None
    assert _due(timeline, Event(at_s=6.0)) == []


def test_faults_of_one_moment_come_in_the_order_of_the_file():
    """A drain before the engine is told, if the author says so."""
    timeline = Timeline([Fault(action=action, at_turn=1) for action in ("drain", "abort_engine")], SEEDS)

    assert timeline.after(Event(0, 1)) == [0, 1]


@given(st.permutations([Event(session, turn) for session in SEEDS for turn in range(1, 30)]))
def test_draws_do_not_depend_on_the_order_of_events(events: list[Event]):
    """The same seeds, the same faults (I10)."""
    faults = [Fault(action="engine_500", probability=0.3), Fault(action="drain", probability=0.1)]

    def drawn(order: list[Event]) -> set[tuple[int, Event]]:
        return set(_due(Timeline(faults, SEEDS), *order))

    assert drawn(events) == drawn(sorted(events))


def test_draws_follow_their_probability_and_their_seed():
    """About as often as it says, and not the same for every session."""
    timeline = Timeline([Fault(action="engine_500", probability=0.25)], {0: 1, 1: 2})

    turns = [
        {event.turn for _, event in _due(timeline, *(Event(session, turn) for turn in range(1, 2001)))}
        for session in (0, 1)
    ]

    assert all(400 < len(each) < 600 for each in turns)
    assert turns[0] != turns[1]


PROMPTS = st.lists(st.tuples(st.sampled_from([b"a", b"b", b"c"]), st.booleans()), max_size=30)


@given(PROMPTS)
def test_a_request_goes_on_with_the_turn_of_its_prompt(requests: list[tuple[bytes, bool]]):
    """Until that turn has its whole answer; numbers are given once and in order."""
    turns, open_turns, begun = TurnCount(), {}, []
    for prompt, is_answered in requests:
        turn, is_first = turns.begin(prompt)
        assert is_first == (prompt not in open_turns)
        assert turn == open_turns.get(prompt, turn)
        open_turns[prompt] = turn
        if is_first:
            begun.append(turn)
        if is_answered:
            turns.end(prompt)
            del open_turns[prompt]

    assert begun == list(range(1, turns.begun + 1))
    assert all(after == before + 1 for before, after in pairwise(begun))


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        ({"action": "drian", "at_turn": 1}, "faults[0].action: expected "),
        (
            {"action": "drain"},
            "faults[0]: expected exactly one of at_turn, at_second, probability and not none of them",
        ),
        (
            {"action": "drain", "at_turn": 1, "at_second": 2.0},
            "faults[0]: expected exactly one of at_turn, at_second, probability and not at_turn and at_second",
        ),
        ({"action": "drain", "at_second": 1.0, "at_token": 3}, "faults[0]: expected at_turn with at_token"),
        ({"action": "pause", "at_turn": 1}, "faults[0]: expected seconds with pause"),
        ({"action": "kill_agent", "at_turn": 1, "seconds": 2}, "faults[0]: expected no seconds with kill_agent"),
        ({"action": "drain", "at_turn": 0}, "faults[0].at_turn: expected greater than or equal to 1, got 0"),
        ({"action": "drain", "probability": 1.5}, "faults[0].probability: expected less than or equal to 1, got 1.5"),
        ({"action": "drain", "at_turn": 1, "sessions": [4]}, "faults: expected sessions from 0 to 3 and not 4"),
        (
            {"action": "drain", "at_trun": 1},
            "faults[0].at_trun: expected a known key, got 'at_trun'; did you mean 'at_turn'?",
        ),
    ],
)
def test_a_wrong_fault_is_one_line(tmp_path: Path, fault: dict[str, object], problem: str):
    """It names the key, what was expected, and what came."""
    [line] = problems_of(write_scenario(tmp_path / "s", faults=[fault]))
    assert line.startswith(problem)


def test_a_scenario_keeps_its_faults(tmp_path: Path):
    """Every action can be written down, and on everything are those that concern everybody."""
    faults = [
        {"action": "stop_agent", "at_turn": 2, "sessions": [1, 3], "seconds": 0.5},
        {"action": "engine_hang", "at_turn": 1, "at_token": 4},
        {"action": "kill_server", "at_second": 1},
        {"action": "malformed_reply", "probability": 0.5},
    ]

    scenario = load_scenario(write_scenario(tmp_path / "s", faults=faults)).scenario

    assert [fault.trigger for fault in scenario.faults] == [
        "at turn 2",
        "at turn 1, token 4",
        "at second 1",
        "with probability 0.5",
    ]
    assert [fault.action in ON_EVERYTHING for fault in scenario.faults] == [False, False, True, False]
