"""Status of a run in a few numbers: progress, session states, speed, time left. Draws nothing."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from harness.cli.live_sessions import LiveSessions
from harness.rollouts.client.session_server import SessionSummary
from harness.server.telemetry.printable import printable
from harness.suite.record.rollout_table import RolloutRecord


@dataclass(slots=True)
class RunStatus:
    """Status of a run; times are seconds of one clock."""

    doing: str = "starting"
    """Last message."""
    since: float = 0.0
    """Time of the last message."""
    total: int = 0
    ended: int = 0
    running: int = 0
    live: LiveSessions = field(default_factory=LiveSessions)
    """Sessions seen last; its tokens are those of ended rollouts, too."""
    _began_at: float | None = None
    _ended_before: int = 0
    _tokens_of_ended: int = 0

    def begin(self, total: int, done: int) -> None:
        """Set the number of rollouts, and of those already done."""
        self.total, self.ended, self._ended_before = total, done, done

    def begin_rollout(self, now: float) -> None:
        """Count a started rollout."""
        self.running += 1
        if self._began_at is None:
            self._began_at = now

    def end_rollout(self, record: RolloutRecord) -> None:
        """Count an ended rollout."""
        self.running -= 1
        self.ended += 1
        self._tokens_of_ended += record.session.ledger.generated

    def look(self, sessions: Mapping[str, SessionSummary], now: float) -> None:
        """Update the sessions."""
        self.live.look(sessions, self._tokens_of_ended + sum(each.tokens for each in sessions.values()), now)

    def seconds_left(self, now: float) -> float | None:
        """Estimate the time left at the pace so far, or None."""
        here = self.ended - self._ended_before
        if self._began_at is None or not here or self.ended == self.total:
            return None
        return (now - self._began_at) / here * (self.total - self.ended)

    def words(self, now: float) -> str:
        """Return the status as one line."""
        if not self.running:
            return f"{printable(self.doing)}: {now - self.since:.0f} s"
        states = Counter(printable(each.state) for each in self.live.sessions.values())
        by_state = f" ({', '.join(f'{count} {state}' for state, count in states.most_common())})" if states else ""
        left = self.seconds_left(now)
        eta = "" if left is None else f", about {describe_seconds(left)} left"
        speed = f"{self.live.tokens_per_s:.0f} tokens/s"
        return f"{self.ended} of {self.total} ended, {self.running} running{by_state}, {speed}{eta}"


def describe_seconds(seconds: float) -> str:
    """Format `75` as `1:15`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
