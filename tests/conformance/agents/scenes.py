"""What happens to agents: they play, are drained twice, paused, and asked to come again. All play a scene at one time.

python -m tests.conformance.agents.scenes WORKDIR FINDINGS.json [AGENT ...]
"""

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from harness.rollouts.agents.programs import bundled_profile, prepare_profile
from harness.server.settings import ServerSettings
from harness.telemetry.logging import configure_logging
from tests.conformance.agents.parts import TOOLS
from tests.conformance.agents.stage import Incident, Played, Stage, staged

PAUSE_S = 20


class Findings(msgspec.Struct, frozen=True):
    """What every agent did in every scene, by its name."""

    alone: dict[str, Played]
    drained_between_turns: dict[str, Played]
    drained_in_flight: dict[str, Played]
    paused: dict[str, Played]
    refused_for_a_while: dict[str, Played]


async def none(stage: Stage) -> None:
    """Nothing happens."""
    stage.leave_tool()


async def drain_between_turns(stage: Stage) -> None:
    """The server is drained while every agent is in its tool; the next turn is refused."""
    await stage.reach_tool()
    await stage.turn_gate("drain")
    stage.leave_tool()


async def drain_in_flight(stage: Stage) -> None:
    """The server is drained and the engine told to abort while every agent waits for its second turn."""
    await stage.reach_tool()
    stage.leave_tool()
    await stage.second_turns_hang()
    await stage.turn_gate("drain")
    await stage.engine.abort(None)


async def pause(stage: Stage) -> None:
    """The gate is shut for `PAUSE_S` and the engine told to abort while every agent waits for its second turn."""
    await stage.reach_tool()
    stage.leave_tool()
    await stage.second_turns_hang()
    await stage.turn_gate("pause")
    await stage.engine.abort(None)
    await stage.become("held", len(stage.agents))
    await asyncio.sleep(PAUSE_S)
    await stage.turn_gate("resume")


async def refuse_for_a_while(stage: Stage) -> None:
    """The second turn is answered 503 with Retry-After until all have been told."""
    await stage.reach_tool()
    await stage.turn_gate("pause")
    stage.leave_tool()
    await stage.all_refused("gate_closed")
    await stage.turn_gate("resume")


IMPATIENT = ServerSettings(comment_every_s=0.5, pause_timeout_s=0.05)
"""The gate holds nothing for long."""


async def play_all(names: Sequence[str], workdir: Path) -> Findings:
    """Every scene with every agent; the other scenes are played during the long pause."""
    agents = [await prepare_profile(bundled_profile(name), print) for name in names]

    async def scene(incident: Incident, **options: object) -> dict[str, Played]:
        async with staged(agents, workdir / incident.__name__, **options) as stage:
            return await stage.play(incident)

    async with asyncio.TaskGroup() as group:
        paused = group.create_task(scene(pause, interrupted=True))
        between = await scene(drain_between_turns)
        in_flight = await scene(drain_in_flight, interrupted=True)
        refused = await scene(refuse_for_a_while, settings=IMPATIENT)
        alone = await scene(none)
    return Findings(alone, between, in_flight, paused.result(), refused)


def main() -> None:
    """Play everything and write what was found."""
    configure_logging("error")
    workdir, findings, *names = sys.argv[1:]
    played = asyncio.run(play_all(names or sorted(TOOLS), Path(workdir)))
    Path(findings).write_bytes(msgspec.json.encode(played))


if __name__ == "__main__":
    main()
