"""Weights that change while a scenario runs: `[weights]` in `scenario.toml`.

Each update waits for its moment, which the session server's list of sessions shows, and is carried out as a trainer
would. The checkpoints are made before the first session begins and stay in the run directory, so that
every logprob of the samples can be checked against them.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field

import msgspec

from harness.client.session_server import SessionServerClient, SessionSummary
from harness.control.weights import WeightUpdater
from harness.control.weights_report import UpdateBudget
from harness.engines.base import PauseMode
from harness.models.perturb import perturb_checkpoint
from harness.suite.record.rundir import RunDirectory
from harness.suite.run.services import OwnServices, Services
from harness.suite.scenarios.scenario import PlannedUpdate, Weights
from harness.types import Json

_LOOK_EVERY_S = 0.1


@asynccontextmanager
async def change_weights(
    weights: Weights | None, services: Services, directory: RunDirectory, say: Callable[[str], None]
) -> AsyncIterator[None]:
    """While the block runs, the updates of `weights` come one after the other; those it leaves no time for do not come.

    Raises what an update raises, when the block has ended.
    """
    if weights is None:
        yield
        return
    assert isinstance(services, OwnServices), "a server that others use keeps its weights"
    say(f"making {len(weights.updates)} checkpoints in {directory.checkpoints}")

    def make_checkpoints() -> None:
        for number in range(1, len(weights.updates) + 1):
            target = directory.checkpoints / str(number)
            perturb_checkpoint(services.model_dir, target.resolve(), number=number, noise=weights.noise)

    await asyncio.to_thread(make_checkpoints)
    schedule = asyncio.create_task(_Schedule(weights, services, directory, say).run(), name="weight schedule")
    try:
        yield
    finally:
        schedule.cancel()
        with suppress(asyncio.CancelledError):
            await schedule


@dataclass(slots=True)
class _Watch:
    """The sessions as they have been seen so far."""

    turns_of: dict[str, int] = field(default_factory=dict)
    live: list[SessionSummary] = field(default_factory=list)
    was_in_flight: set[str] = field(default_factory=set)
    """Sessions that had a turn in flight in the look before this one, too."""
    ended: int = 0

    def look(self, sessions: list[SessionSummary]) -> None:
        """Take in the sessions of now."""
        now = {each.session_id for each in sessions}
        self.ended += sum(each.session_id not in now for each in self.live)
        before = {each.session_id for each in self.live if each.turns_in_flight}
        self.was_in_flight = before & {each.session_id for each in sessions if each.turns_in_flight}
        self.live = sessions
        self.turns_of |= {each.session_id: each.turns for each in sessions}

    @property
    def turns(self) -> int:
        """Turns of all sessions so far."""
        return sum(self.turns_of.values())

    def is_time(self, update: PlannedUpdate, since: "_Watch") -> bool:
        """Whether the moment of `update` is now; `since` is how things stood after the update before."""
        if self.turns < since.turns + update.after_turns:
            return False
        match update.when:
            case "in_turn":
                return bool(self.was_in_flight)
            case "in_tool_call":
                return any(each.turns and not each.turns_in_flight for each in self.live)
            case "session_ended":
                return self.ended > since.ended


class _Schedule:
    def __init__(
        self, weights: Weights, services: OwnServices, directory: RunDirectory, say: Callable[[str], None]
    ) -> None:
        self._weights = weights
        self._services = services
        self._directory = directory
        self._say = say
        budget = UpdateBudget(sweep_s=weights.sweep_s)
        mode = PauseMode(weights.mode)
        self._updater = WeightUpdater([services.engine], [services.address], mode=mode, budget=budget)
        self._began = time.monotonic()
        self._reports: list[Json] = []

    async def run(self) -> None:
        """Carry out every update at its moment."""
        watch = _Watch()
        async with SessionServerClient(self._services.address) as server:
            for version, update in enumerate(self._weights.updates, start=1):
                since = _Watch(dict(watch.turns_of), ended=watch.ended)
                watch.look(await server.sessions())
                while not watch.is_time(update, since):
                    await asyncio.sleep(_LOOK_EVERY_S)
                    watch.look(await server.sessions())
                await self._carry_out(version, update)

    async def _carry_out(self, version: int, update: PlannedUpdate) -> None:
        at_s = time.monotonic() - self._began
        async with self._updater.update(version) as running:
            await running.apply((self._directory.checkpoints / str(version)).resolve())
        report = running.report
        settled = int(report.telemetry()["weights/proximal_tokens_settled"])
        problems = f"; {'; '.join(report.problems)}" if report.problems else ""
        self._say(
            f"weights {report.version} ({update.when}): agents waited {report.pause_s:.2f} s,"
            f" the sweep settled {settled} tokens{problems}"
        )
        self._reports.append(
            {
                "version": version,
                "when": update.when,
                "at_s": at_s,
                "mode": str(report.mode),
                "pause_s": report.pause_s,
                "seconds": {str(step): seconds for step, seconds in report.seconds.items()},
                "workers": [asdict(worker) for worker in report.workers],
                "sweeps": [msgspec.structs.asdict(server.sweep) for server in report.servers if server.sweep],
                "problems": list(report.problems),
            }
        )
        self._directory.write_json(self._directory.weights, {"updates": self._reports})
