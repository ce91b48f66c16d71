"""Unmodified agents in a box without a network, on a model that thinks: token-exact, one sample each.

`HARNESS_SOAK_BOXES=all` plays all of them in containers, too.
"""

import os
from dataclasses import replace

import pytest

from harness.rollouts.agents.programs import bundled_profile, prepare_profile
from harness.server.settings import ServerSettings
from tests.conformance.agents.parts import part_of, turns_of
from tests.conformance.agents.scenes import QWEN3
from tests.conformance.agents.stage import staged
from tests.conformance.families.family import load
from tests.conformance.families.packages import fetch_tokenizer

pytestmark = [pytest.mark.agent, pytest.mark.timeout(900), pytest.mark.xdist_group("agents")]

AGENTS = ("claude_code", "codex", "gemini_cli", "mini_swe_agent", "opencode")
IN_CONTAINERS = AGENTS if os.environ.get("HARNESS_SOAK_BOXES") == "all" else ("claude_code", "codex")
PLAYED = [*(("bwrap", name) for name in AGENTS), *(("podman", name) for name in IN_CONTAINERS)]


async def _no_incident(_stage):
    """Nothing happens to the agent."""


@pytest.mark.parametrize(("kind", "name"), PLAYED)
async def test_an_agent_plays_its_task_in_a_box(kind, spec_of, name, tmp_path):
    """Its installation is shown read-only, also to a container; its tool writes into the workdir."""
    fetch_tokenizer(QWEN3)
    agent = replace(await prepare_profile(bundled_profile(name), print), sandbox=spec_of(kind))
    folder, part, chat = tmp_path / "work", part_of(name, thinks=True), load(QWEN3).chat
    async with staged(agent, folder, part, settings=ServerSettings(), chat_tokenizer=chat) as stage:
        played = await stage.play(_no_incident)
    assert (played.outcome, played.notes) == ("finished", "one\ntwo\n"), (played.detail, played.log)
    assert (played.main_turns, played.is_exact, played.is_one_sample) == (turns_of(name), True, True), played
    assert played.unaccounted == 0
