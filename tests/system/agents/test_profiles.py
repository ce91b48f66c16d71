"""A scenario is played by an agent that nobody rewrote, and nothing of its home directory stays."""

import asyncio
from pathlib import Path

import pytest

from harness.suite.record.rollout_table import read_rollouts
from tests.harness_command import harness, write_scenario

pytestmark = pytest.mark.agent


async def test_a_scenario_names_an_agent_by_its_profile(tmp_path: Path) -> None:
    """It is installed, finds its session, and what it wrote at home is gone; its side calls are no samples."""
    scenario = write_scenario(
        tmp_path / "noted", agent={"profile": "openai_agents"}, check=None, prompts=[{}], samples_per_prompt=1
    )
    ended = await asyncio.to_thread(harness, "run", scenario, "--out", tmp_path / "run", timeout_s=200)

    assert ended.code == 0, ended.stdout + ended.stderr
    [record] = read_rollouts(tmp_path / "run" / "run.db").values()
    assert record.agent_result is not None
    assert record.agent_result["answer"]
    [workdir] = (tmp_path / "run" / "sessions").iterdir()
    assert not (workdir / ".home").exists()
