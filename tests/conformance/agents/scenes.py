"""What happens to agents: they are drained twice, paused, and asked to come again.

python -m tests.conformance.agents.scenes WORKDIR FINDINGS.json [AGENT ...]
"""

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from harness.rollouts.agents.programs import bundled_profile, prepare_profile
from harness.rollouts.agents.task import ProgramAgent
from harness.server.settings import ServerSettings
from harness.server.telemetry.logging import configure_logging
from harness.tokens.templates.chat_template import ChatTemplateTokenizer
from tests.conformance.agents.parts import AGENTS, SYSTEM_AMONG_MESSAGES, long_part_of, made_impatient, part_of
from tests.conformance.agents.stage import Incident, Played, Stage, staged
from tests.conformance.families.family import load
from tests.toy_model import write_toy_model

PAUSE_S = 20
QWEN3 = "qwen3"
AT_A_TIME = 4
"""Agents: most of the time one of them waits. Beside them are as many in a long pause, which do nothing."""


class Findings(msgspec.Struct, frozen=True):
    """What every agent did in every scene, by its name."""

    drained_between_turns: dict[str, Played]
    drained_in_flight: dict[str, Played]
    paused: dict[str, Played]
    refused_for_a_while: dict[str, Played]
    """On a model that thinks before every call."""
    strictly: dict[str, Played]
    """Those that put system messages behind others, 20 tool turns long, on a template that refuses these."""


async def none(stage: Stage) -> None:
    """Nothing happens."""
    stage.leave_tool()


async def drain_between_turns(stage: Stage) -> None:
    """The server is drained while the agent is in its tool; the next turn is refused."""
    await stage.reach_tool()
    await stage.turn_gate("drain")
    stage.happens_now()


async def drain_in_flight(stage: Stage) -> None:
    """The server is drained and the engine told to abort while the agent waits for its second turn."""
    await stage.reach_tool()
    stage.leave_tool()
    await stage.second_turn_hangs()
    await stage.turn_gate("drain")
    stage.happens_now()
    await stage.engine.abort(None)


async def pause(stage: Stage) -> None:
    """The gate is shut for `PAUSE_S` and the engine told to abort while the agent waits for its second turn."""
    await stage.reach_tool()
    stage.leave_tool()
    await stage.second_turn_hangs()
    await stage.turn_gate("pause")
    await stage.engine.abort(None)
    await stage.is_held()
    await asyncio.sleep(PAUSE_S)
    stage.happens_now()


async def refuse_for_a_while(stage: Stage) -> None:
    """The second turn is answered 503 with Retry-After until the agent has been told."""
    await stage.reach_tool()
    await stage.turn_gate("pause")
    stage.leave_tool()
    await stage.is_refused("gate_closed")
    stage.happens_now()


TALKATIVE = ServerSettings(comment_every_s=0.5)
SILENT = ServerSettings(comment_every_s=60)
"""No head of a stream leaves before its turn has ended: some clients ask again after one, and load decided."""
IMPATIENT = ServerSettings(comment_every_s=0.5, pause_timeout_s=0.05)
"""The gate holds nothing for long."""


def strict_template(folder: Path) -> ChatTemplateTokenizer:
    """The toy template, of a family that takes a system message at the beginning only."""
    model = write_toy_model(folder / "strict_model")
    path, loop = model / "chat_template.jinja", "{%- for message in messages %}\n"
    refusal = (
        "{%- if not loop.first and message.role in ('system', 'developer') %}{{- raise_exception('late') }}{% endif %}"
    )
    template = path.read_text(encoding="utf-8")
    assert template.count(loop) == 1
    path.write_text(template.replace(loop, loop + refusal), encoding="utf-8")
    return ChatTemplateTokenizer.load(model)


async def play_all(names: Sequence[str], workdir: Path) -> Findings:
    """Every scene with every agent, a few at a time."""
    agents = [await prepare_profile(bundled_profile(name), print) for name in names]
    places, idle = asyncio.Semaphore(AT_A_TIME), asyncio.Semaphore(AT_A_TIME)

    async def play(
        agent: ProgramAgent, incident: Incident, *, interrupted: bool = False, settings: ServerSettings = TALKATIVE
    ) -> Played:
        folder, part = workdir / incident.__name__ / agent.name, part_of(agent.name, interrupted=interrupted)
        async with idle if incident is pause else places, staged(agent, folder, part, settings=settings) as stage:
            return await stage.play(incident)

    async def play_strictly(agent: ProgramAgent) -> Played:
        folder, strict = workdir / "strict" / agent.name, strict_template(workdir)
        async with (
            places,
            staged(agent, folder, long_part_of(agent.name), settings=TALKATIVE, chat_tokenizer=strict) as stage,
        ):
            return await stage.play(none)

    async def play_thinking(agent: ProgramAgent) -> Played:
        folder, part = workdir / "thinks" / agent.name, part_of(agent.name, thinks=True)
        async with places, staged(agent, folder, part, settings=IMPATIENT, chat_tokenizer=load(QWEN3).chat) as stage:
            return await stage.play(refuse_for_a_while)

    paused = [play(made_impatient(agent), pause, interrupted=True) for agent in agents]
    between = [play(agent, drain_between_turns) for agent in agents]
    in_flight = [play(agent, drain_in_flight, interrupted=True, settings=SILENT) for agent in agents]
    thinking = [play_thinking(agent) for agent in agents]
    scenes = (between, in_flight, paused, thinking)
    played = [asyncio.gather(*scene) for scene in scenes]
    strictly = {agent.name: await play_strictly(agent) for agent in agents if agent.name in SYSTEM_AMONG_MESSAGES}
    return Findings(*[dict(zip(names, await scene, strict=True)) for scene in played], strictly)


def main() -> None:
    """Play everything and write what was found."""
    configure_logging("error")
    workdir, findings, *names = sys.argv[1:]
    played = asyncio.run(play_all(names or AGENTS, Path(workdir)))
    Path(findings).write_bytes(msgspec.json.encode(played))


if __name__ == "__main__":
    main()
