"""Who is there: the sessions of one scenario, by id and by their position in it."""

from collections.abc import Mapping

from harness.suite.faults.session_server import KillableServer


class Company:
    """The sessions of `scenario`: their rollouts have the numbers from `first` on; `seeds` are theirs, by position."""

    def __init__(self, scenario: str, server: KillableServer, first: int, seeds: Mapping[int, int]) -> None:
        self.scenario = scenario
        self._server = server
        self._first = first
        self.seeds = seeds
        self._met: dict[str, int] = {}

    def present(self) -> dict[str, int]:
        """The sessions that are open now; none while the server is gone."""
        there = {each: self.position_of(number) for each, number in self._server.open_sessions.items()}
        mine = {session_id: position for session_id, position in there.items() if position in self.seeds}
        self._met |= mine
        return mine

    def position_of(self, number: int) -> int:
        """The position of rollout `number` of the run."""
        return number - self._first

    def position(self, session_id: str) -> int | None:
        """The position of a session, also when it has ended; None when it is none of the scenario's."""
        if session_id not in self._met:
            self.present()
        return self._met.get(session_id)
