"""Unmodified agents in a box without a network, on a model that thinks: token-exact, one sample each."""

from dataclasses import replace

import pytest

from harness.rollouts.agents.programs import bundled_profile, prepare_profile
from harness.server.settings import ServerSettings
from tests.conformance.agents.parts import part_of, turns_of
from tests.conformance.agents.stage import staged

pytestmark = [pytest.mark.agent, pytest.mark.timeout(900), pytest.mark.xdist_group("agents")]

AGENTS = ("claude_code", "codex")


async def _no_incident(_stage):
    """Nothing happens to the agent."""


@pytest.mark.parametrize("name", AGENTS)
async def test_an_agent_plays_its_task_in_a_box(kind, spec_of, name, tmp_path):
    """Its installation is shown read-only, also to a container; its tool writes into the workdir."""
    agent = replace(await prepare_profile(bundled_profile(name), print), sandbox=spec_of(kind))
    async with staged(agent, tmp_path / "work", part_of(name, thinks=True), settings=ServerSettings()) as stage:
        played = await stage.play(_no_incident)
    assert (played.outcome, played.notes) == ("finished", "one\ntwo\n"), (played.detail, played.log)
    assert (played.main_turns, played.is_exact, played.is_one_sample) == (turns_of(name), True, True), played
    assert played.unaccounted == 0
