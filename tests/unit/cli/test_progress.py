"""The progress of a run: nobody waits two seconds for a word, and no terminal is flooded."""

import io

import pytest
from rich.console import Console

from harness.cli.runs.progress import SILENCE_S, RunProgress
from harness.rollouts.client.session_server import SessionSummary
from harness.samples.rollout import OutcomeKind
from harness.sessions.ledger import Ledger
from harness.suite.record.rollout_table import RecordedSession, RolloutRecord
from harness.suite.scenarios.folder import find_scenarios
from harness.suite.scenarios.plan import plan_rollouts
from harness.viewer.live.live_reading import LiveSessions

_PLANNED = plan_rollouts(find_scenarios("quickstart"))[0].find(0)


class _Clock:
    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


def _record(number: int, tokens: int) -> RolloutRecord:
    return RolloutRecord(
        number=number,
        group=0,
        scenario="s",
        seed=1,
        session_id=None,
        outcome=OutcomeKind.FINISHED,
        cause=None,
        detail="",
        agent_result=None,
        reward=None,
        score={},
        score_error=None,
        session=RecordedSession(turns=1, ledger=Ledger(tokens, tokens)),
        samples=[],
        seconds=1.0,
    )


def _sessions(tokens: dict[int, int], state: str = "engine") -> dict[str, SessionSummary]:
    return {f"s/{number}": SessionSummary("id", "open", 3, 0, state, count) for number, count in tokens.items()}


def test_a_pipe_is_never_silent_for_two_seconds():
    """Looked at four times a second for a minute in which nothing happens, it always has had a word of late."""
    clock, said = _Clock(), io.StringIO()
    progress = RunProgress(Console(file=said, width=200), is_resumed=False, clock=clock)
    progress.say("starting the engine")
    spoke_at, written = [clock.now], said.tell()
    for _ in range(240):
        clock.now += 0.25
        progress.break_silence()
        if said.tell() > written:
            spoke_at, written = [*spoke_at, clock.now], said.tell()
    silences = [later - before for before, later in zip(spoke_at, [*spoke_at[1:], clock.now], strict=True)]

    assert max(silences) <= SILENCE_S + 0.25 < 2
    assert "starting the engine: 60 s" in said.getvalue()


def test_the_standing_has_pace_states_and_what_is_left():
    """Tokens per second over ended and live sessions, and the time left at the pace since it was taken up."""
    clock = _Clock()
    progress = RunProgress(Console(file=io.StringIO()), is_resumed=False, clock=clock)
    progress.begin(total=10, done=4)
    for _ in range(2):
        progress.begin_rollout(_PLANNED)
    clock.now += 1
    progress.look(_sessions({4: 100, 5: 50}))
    progress.end_rollout(_record(4, 130))
    clock.now += 2
    progress.look(_sessions({5: 70}, "tool"))
    line = progress.words(clock.now + 1)

    assert line == "5 of 10 ended, 1 running (1 tool), 25 tokens/s, about 0:20 left"
    assert progress.live.rates["s/5"] == 10.0


def test_a_server_that_answers_slowly_has_a_speed():
    """Two looks that are further apart than the speed covers are still two looks."""
    live = LiveSessions()
    for count in range(3):
        live.look(_sessions({0: 100 * count}), 100 * count, 50.0 * count)

    assert (live.tokens_per_s, live.rates["s/0"], live.rates.get("s/1")) == (2.0, 2.0, None)


@pytest.mark.parametrize("height", [10, 25])
def test_a_thousand_sessions_fit_on_a_terminal(height: int):
    """As many rows as it has, less the frame; the rest is a number."""
    screen = io.StringIO()
    console = Console(file=screen, width=100, height=height, force_terminal=True, color_system=None)
    progress = RunProgress(console, is_resumed=False)
    progress.begin(1_000, 0)
    for _ in range(1_000):
        progress.begin_rollout(_PLANNED)
    progress.look(_sessions(dict.fromkeys(range(100), 1)))
    console.print(progress.draw())
    lines = screen.getvalue().splitlines()

    assert len(lines) <= height - 1
    assert lines[-1].strip() == f"and {1_000 - (height - 4)} more"


def test_a_server_moves_no_cursor():
    """The state is a word of the server, which may be somebody else's."""
    screen = io.StringIO()
    console = Console(file=screen, width=100, height=20, force_terminal=True, color_system=None)
    progress = RunProgress(console, is_resumed=False)
    progress.begin(1, 0)
    progress.begin_rollout(_PLANNED)
    progress.look(_sessions({0: 1}, "\x1b[2J\x07[bold]"))
    console.print(progress.draw())

    assert r"\x1b[2J" in screen.getvalue()
    assert "\x07" not in screen.getvalue()
