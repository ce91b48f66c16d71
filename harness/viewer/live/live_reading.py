"""A running server as `harness ctl top`, `harness run` and the live page show it: they only format these values."""

from collections import deque
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from harness.rollouts.client.session_server import SessionList, SessionServerClient, SessionSummary
from harness.sessions.gate import GateReport
from harness.viewer.run_view import SessionLine

_WINDOW_S = 10.0
"""Time that the speed of all sessions covers."""


class LiveSessions:
    """Sessions by name, with their speeds; times are seconds of one clock."""

    def __init__(self) -> None:
        self.sessions: Mapping[str, SessionSummary] = {}
        self.rates: Mapping[str, float] = {}
        """Tokens per second between the last two looks, of sessions in both."""
        self._seen: deque[tuple[float, int]] = deque()

    def look(self, sessions: Mapping[str, SessionSummary], tokens: int, now: float) -> None:
        """Record the sessions, and the tokens of these and all others so far."""
        seconds = now - self._seen[-1][0] if self._seen else 0.0
        both = self.sessions.keys() & sessions.keys() if seconds > 0 else ()
        self.rates = {each: max(0.0, (sessions[each].tokens - self.sessions[each].tokens) / seconds) for each in both}
        self.sessions = sessions
        self._seen.append((now, tokens))
        while len(self._seen) > 2 and now - self._seen[0][0] > _WINDOW_S:
            self._seen.popleft()

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second lately; 0 before the second look, and after a restart of the server."""
        if not self._seen:
            return 0.0
        (first, before), (last, tokens) = self._seen[0], self._seen[-1]
        return max(0.0, (tokens - before) / (last - first)) if last > first else 0.0


class Reading(NamedTuple):
    gate: GateReport
    listed: SessionList
    live: LiveSessions

    def facts(self) -> Iterator[tuple[str, str]]:
        """Yield name and words of all sessions, the gate, and each hold and worker; not yet printable."""
        totals = self.listed.totals
        states = ", ".join(f"{count} {state}" for state, count in sorted(totals.states.items())) or "none"
        since_start = f"{totals.turns:,} turns, {totals.tokens:,} tokens since the start"
        yield "sessions", f"{states}; {since_start}, {self.live.tokens_per_s:.0f} tokens/s"
        yield from gate_facts(self.gate)
        for each in self.listed.workers:
            name, version = each.name or "the engine", each.weight_version or "-"
            yield "worker", f"{name}  version {version}, {each.fence or 'serves'}, {each.in_flight} in flight"


async def read_server(
    client: SessionServerClient, live: LiveSessions, now: float, *, limit: int | None = None, deadline_s: float
) -> Reading:
    """Read the gate and all sessions, or the `limit` busiest ones, into `live`. Raises `SessionServerError`."""
    # The gate first, because a server that is gone fails here at once.
    gate = await client.gate().report(deadline_s=deadline_s)
    listing = client.list_all(deadline_s=deadline_s) if limit is None else client.busiest(limit, deadline_s=deadline_s)
    listed = await listing
    live.look({each.session_id: each for each in listed.sessions}, listed.totals.tokens, now)
    return Reading(gate, listed, live)


def gate_facts(gate: GateReport) -> Iterator[tuple[str, str]]:
    """Yield the state of the gate, then holder, kind and remaining time of each hold."""
    yield "gate", f"{gate.state}, {gate.held} requests wait"
    for hold in gate.holds:
        engines = ", and the engines" if hold.engines else ""
        yield "hold", f"{hold.holder}  {hold.kind}{engines}, ends in {hold.ends_in_s:.0f} s"


def live_line(session: SessionSummary, rate: float | None = None) -> SessionLine:
    """Return the line of a session that samples `rate` tokens per second."""
    speed = "" if rate is None else f", {rate:.0f} tokens/s"
    return SessionLine(
        session.session_id,
        state=session.state or session.phase,
        detail=f"{session.turns_in_flight} in flight{speed}" if session.turns_in_flight else "",
        turns=session.turns,
        sampled=session.tokens,
    )
