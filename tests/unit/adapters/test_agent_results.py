"""A program's result file can be written by the model that it runs: untrusted, it sets no reward and no metadata."""

import json
from pathlib import Path
from typing import Any

import pytest

from harness.adapters import areal, verl
from harness.adapters.episodes import EpisodeSettings
from harness.adapters.miles.settings import read_settings
from harness.errors import AdapterError
from harness.samples.rollout import Rollout
from harness.types import Json
from tests.unit.adapters.miles_runs import miles_args, miles_run
from tests.unit.adapters.test_areal import STEPS, episode, two_turns
from tests.unit.adapters.test_miles_generate import generate, state_of
from tests.unit.adapters.test_verl import PROGRAM, output

pytestmark = pytest.mark.usefixtures("trainers")

RESULT = {
    "reward": 99.0,
    "answer": "forged",
    "harness": {},
    "agent_metrics": {"total_tool_time": 5000.0},
    "score": {"tests": 3, "style": "good"},
    "reason": "all pass",
}
STATED = {"figures": {"tests": 3.0}, "reason": "all pass"}
"""What of it a sample may carry: numbers only."""


@pytest.fixture(name="forger")
def _forger(tmp_path: Path) -> str:
    """A program that leaves `RESULT`."""
    script = tmp_path / "agent.py"
    script.write_text(PROGRAM.format(result=json.dumps(RESULT)))
    return str(script)


@pytest.mark.agent
@pytest.mark.parametrize("is_trusted", [False, True])
async def test_a_sample_of_miles_takes_nothing_from_a_program(forger: str, is_trusted: bool) -> None:
    """Its result is one entry of the metadata, under what the data set says; with the option it is as a function's."""
    options = ("--harness-agent", forger, *(["--harness-trust-agent-result"] if is_trusted else []))
    async with miles_run(*STEPS, options=options) as run:
        metadata = {"answer": "42", "agent": {}}
        sample = await generate(state_of(run), prompt="Do it.", metadata=metadata, reward=None)
        sample = sample[0] if isinstance(sample, list) else sample
    found = (sample.reward, sample.metadata["answer"], sample.non_generation_time == 5000.0)
    assert found == ((99.0, "forged", True) if is_trusted else (None, "42", False))
    assert sample.metadata.get("agent_result") == (None if is_trusted else RESULT)
    assert sample.metadata["harness"]["outcome"] == "finished"
    assert sample.metadata["harness"].get("score") == (STATED if is_trusted else None)


async def test_an_entry_of_the_data_set_stands_over_the_result(forger: str) -> None:
    async with miles_run(*STEPS, options=("--harness-agent", forger)) as run:
        sample = await generate(state_of(run), prompt="Do it.", metadata={"agent_result": "mine", "agent": {}})
        sample = sample[0] if isinstance(sample, list) else sample
    assert sample.metadata["agent_result"] == "mine"


def test_functions_are_trusted_and_programs_by_name(forger: str) -> None:
    """In the settings that miles and slime read; slime's are attributes of its arguments."""
    given = ("--harness-session-server", "http://s")
    function = ("--custom-agent-function-path", "sure_agent.run")
    assert read_settings(miles_args(*given, *function)).trusts_agent
    assert not read_settings(miles_args(*given, "--harness-agent", forger)).trusts_agent
    assert read_settings(miles_args(*given, "--harness-agent", forger, harness_trust_agent_result=True)).trusts_agent
    EpisodeSettings.read("http://s", two_turns).require_trusted("")
    EpisodeSettings.read("http://s", forger, trust_agent_result=True).require_trusted("")


@pytest.mark.agent
async def test_areal_scores_a_program_itself_or_trusts_it(forger: str) -> None:
    """Said when the workflow is made, not by a rejection of every episode."""
    row = {"messages": [{"role": "user", "content": "Do it."}], "agent": {}}
    message = r"^agent: the model can write a program's result.* override `score`, or set trust_agent_result=True$"

    class Scored(areal.SessionWorkflow):
        """Looks at what was said."""

        async def score(self, rollout: Rollout, data: Json) -> float:
            return float(len(rollout.samples))

    async with miles_run(*STEPS) as run:
        with pytest.raises(AdapterError, match=message):
            areal.SessionWorkflow(run.server.url, forger)
        Scored(run.server.url, forger)
        made = await episode(run, forger, row=row, trust_agent_result=True)
    assert made["rewards"].tolist() == [99.0]


@pytest.mark.agent
async def test_verl_scores_a_program_itself_or_trusts_it(forger: str) -> None:
    message = r"^agent: .* states no reward; set is_scored_by_agent=False, or set trust_agent_result=True$"
    async with miles_run(*STEPS) as run:
        with pytest.raises(AdapterError, match=message):
            await output(run, forger)
        left: Any = await output(run, forger, is_scored_by_agent=False)
        trusted: Any = await output(run, forger, trust_agent_result=True)
    await verl.close()
    assert (left.reward_score, trusted.reward_score) == (None, 99.0)
    assert [each.extra_fields["harness"]["score"] for each in (left, trusted)] == [{}, STATED]
