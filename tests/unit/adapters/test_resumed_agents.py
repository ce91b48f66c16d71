"""An agent whose sandbox dies continues under each trainer, with one sample of both lives."""

import argparse
import asyncio
import shlex
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from harness.adapters.slime import close
from harness.engines.scripted import ScriptedFault, ScriptStep
from harness.server.store.sqlite import list_sessions
from harness.types import Json
from tests.session_servers.served import eventually, says
from tests.unit.adapters.miles_runs import MilesRun, miles_run
from tests.unit.adapters.test_areal import episode
from tests.unit.adapters.test_miles_generate import generate, state_of
from tests.unit.adapters.test_slime import PARAMS, PROMPT
from tests.unit.adapters.test_verl import output

pytestmark = pytest.mark.usefixtures("trainers")

PROGRAM = """
import json, os, signal, urllib.request

def say(messages):
    body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages}).encode()
    headers = {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    return json.load(urllib.request.urlopen(urllib.request.Request(url, body, headers)))["choices"][0]["message"]

messages = [{"role": "user", "content": "go"}]
for number in range(3):
    messages += [say(messages), {"role": "user", "content": f"more {number}"}]
    if number == 1 and not os.path.exists(os.getcwd() + "-life-1"):
        os.kill(os.getpid(), signal.SIGKILL)
with open(os.environ["HARNESS_RESULT_FILE"], "w") as file:
    json.dump({"reward": 1.0}, file)
"""
METADATA = {"index": 7, "group": 1, "agent": {}}


async def mask_of_miles(run: MilesRun, _agent: str) -> list[int]:
    """The options are in the run's arguments."""
    sample = await generate(state_of(run), prompt="Do it.", metadata=METADATA)
    return list(sample.loss_mask)


async def mask_of_slime(run: MilesRun, agent: str) -> list[int]:
    """Its options are attributes, from a file."""
    from slime.rollout.sglang_rollout import generate_and_rm
    from slime.utils.types import Sample

    args = argparse.Namespace(
        custom_generate_function_path="harness.adapters.slime.generate",
        harness_agent=agent,
        harness_session_server=run.server.url,
        harness_trust_agent_result=True,
        harness_resume_attempts=1,
        tokenizer=run.args.tokenizer,
    )
    try:
        [sample] = await generate_and_rm(
            args, Sample(index=7, prompt=PROMPT, label="42", metadata=METADATA), dict(PARAMS)
        )
    finally:
        await close(args)
    return list(sample.loss_mask)


async def mask_of_areal(run: MilesRun, agent: str) -> list[int]:
    row: Json = {"messages": PROMPT, "agent": {}}
    made = await episode(run, agent, row=row, trust_agent_result=True, resume_attempts=1)
    return list(made["loss_mask"][0].tolist())


async def mask_of_verl(run: MilesRun, agent: str) -> list[int]:
    made = await output(run, agent, trust_agent_result=True, resume_attempts=1)
    return list(made.response_mask)


@pytest.fixture(name="agent")
def _agent(tmp_path: Path) -> str:
    script = tmp_path / "agent"
    script.write_text(PROGRAM)
    return f"{shlex.quote(sys.executable)} -S {script}"


def options_of(agent: str) -> tuple[str, ...]:
    """Of miles."""
    return ("--harness-agent", agent, "--harness-trust-agent-result", "--harness-resume-attempts", "1")


@pytest.mark.xdist_group("torch")
@pytest.mark.parametrize("mask_of", [mask_of_miles, mask_of_slime, mask_of_areal, mask_of_verl])
async def test_a_killed_agent_goes_on_under_each_trainer(
    tmp_path: Path, agent: str, mask_of: Callable[[MilesRun, str], Awaitable[list[int]]]
) -> None:
    """The engine samples three turns in both lives together, and the sample trains all three."""
    store = tmp_path / "s.db"
    async with miles_run(*says("one"), options=options_of(agent), store=store) as run:
        mask = await mask_of(run, agent)

    lives = list_sessions(store).values()
    assert len(lives) == 2
    assert sum(map(int, mask)) == sum(life.sampled for life in lives) == 3 * len("one.")


async def test_the_end_of_a_step_finds_an_agent_in_its_second_life(tmp_path: Path, agent: str) -> None:
    """Its sample comes back with what it has, and no third life begins."""
    hangs = ScriptStep(text="An answer.", fault=ScriptedFault.HANG, fault_after=3)
    steps, store = (*says("one", "two"), hangs), tmp_path / "s.db"
    async with miles_run(*steps, options=options_of(agent), store=store) as run:
        state = state_of(run)
        going = asyncio.create_task(generate(state, prompt="Do it.", metadata=METADATA))
        await eventually(lambda: len(run.server.server.sessions) == 1 and bool(run.engine.played))
        await eventually(lambda: any(each.config.inherits is not None for each in run.server.server.sessions))
        [heir] = run.server.server.sessions
        run.engine.play_from(heir.session_id, 2)
        await eventually(lambda: any(live.sampled == 3 for live in run.engine.live))
        state.aborted = True
        sample: Any = await going

    assert sample.status.value == "aborted"
    assert sample.metadata["harness"]["outcome"] == "drained"
    assert sum(sample.loss_mask) == len("one.") + len("two.") + 3
    assert len(list_sessions(store)) == 2
