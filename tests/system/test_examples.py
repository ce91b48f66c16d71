"""Every example runs as its page says, with a scripted or a tiny model in place of the reader's.

Those of trainers run in tests/unit/adapters/test_embedding_page.py, beside the stand-ins.
"""

import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from harness.engines.scripted import Script, ScriptedEngine, ScriptStep
from tests.builders import toy_tokenizer
from tests.checkout import ROOT
from tests.conformance.agents.parts import tool_call
from tests.fake_engines.fake_server import serving
from tests.fake_engines.fake_vllm import FakeVLLM
from tests.harness_command import harness
from tests.run_to_end import run_to_end
from tests.sandbox_programs import require_program
from tests.toy_model import write_toy_weights

EXAMPLES = ROOT / "examples"
SMALL = ("claude_code", "torch_batch", "grpo", "miles", "verl", "areal", "mcp_tools", "harbor_task")
LINES = 60
"""Of code, and of the page."""
HANGS_S = 240
"""Against hanging; each example takes seconds on a quiet machine."""


@pytest.fixture(name="model", scope="module")
def _model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny random model."""
    return write_toy_weights(tmp_path_factory.mktemp("toy"), seed=0)


@asynccontextmanager
async def vllm(*says: ScriptStep) -> AsyncIterator[str]:
    """A server by vLLM's protocol whose model says this in each session."""
    fake = FakeVLLM(ScriptedEngine(toy_tokenizer(), Script(says)))
    async with serving(fake, notices_disconnects=True) as url:
        yield url


async def run(example: str, *arguments: str | Path, folder: Path) -> list[str]:
    """The lines that a script of the examples prints."""
    command, env = (sys.executable, EXAMPLES / example, *arguments), os.environ | {"PYTHONPATH": str(ROOT)}
    code, printed, errors = await run_to_end(*command, within_s=HANGS_S, cwd=folder, env=env)
    assert code == 0, errors
    return printed.splitlines()


@pytest.mark.parametrize("name", SMALL)
def test_an_example_is_one_page_and_little_code(name: str) -> None:
    """Scripts of Python and of the shell count; the page has a title and the command that runs it."""
    page = (EXAMPLES / name / "README.md").read_text(encoding="utf-8")
    code = [path.read_text(encoding="utf-8") for path in (EXAMPLES / name).rglob("*") if path.suffix in (".py", ".sh")]
    assert sum(text.count("\n") for text in code) <= LINES
    assert page.count("\n") <= LINES
    assert page.startswith("# ")
    assert "```console" in page or "```sh" in page


@pytest.mark.agent
async def test_claude_code_mends_a_program_on_vllm(model: Path, tmp_path: Path) -> None:
    """It runs a command that its model calls, and the program passes its test."""
    mended = "printf 'def mean(n):\\n    return sum(n) / len(n) if n else 0.0\\n' > mean.py"
    call = tool_call("Bash", {"command": mended, "description": "Mends mean"})
    async with vllm(call, ScriptStep(text="Done.")) as url:
        printed = await run("claude_code/run.py", url, model, "1", folder=tmp_path)

    assert printed[-1].startswith("0: finished, reward 1.0, ")
    assert not printed[-1].endswith(" 0 tokens to train")


async def test_a_loop_becomes_a_batch_of_torch(model: Path, tmp_path: Path) -> None:
    """Eight rollouts of two turns, two of them right."""
    async with vllm(ScriptStep(text="3?"), ScriptStep(text="5?")) as url:
        [printed] = await run("torch_batch/batch.py", f"vllm={url}", model, folder=tmp_path)

    assert "'labels': (8, " in printed
    assert printed.endswith("[0.0, 0.0, 1.0, 0.0, 0.5, 0.0, 0.0, 0.0]")


async def test_grpo_trains_the_local_engine(model: Path, tmp_path: Path) -> None:
    """A step of four groups, whose weights go to the engine under the sessions of the next one."""
    [printed] = await run("grpo/grpo.py", model, "1", folder=tmp_path)

    assert printed.startswith("step 0: mean reward 0.")
    before, after = (folder / "model.safetensors" for folder in (model, tmp_path / "weights" / "1"))
    assert before.read_bytes() != after.read_bytes()


@pytest.mark.agent
def test_an_agent_calls_tools_over_mcp(tmp_path: Path) -> None:
    """On the words of its script: a call, its result from the tool server, and the right answer."""
    ended = harness(
        *("run", EXAMPLES / "mcp_tools", "--set", "samples_per_prompt=1", "--json", "--out", tmp_path / "run")
    )

    assert ended.code == 0, ended.stderr
    [scenario] = ended.document["scenarios"]
    assert (scenario["tool_calls"], scenario["reward_mean"]) == (1, 1.0)


@pytest.mark.parametrize(("agent", "reward"), [("oracle", 1.0), ("nop", 0.0)])
def test_a_sandboxed_task_is_judged_by_its_own_tests(tmp_path: Path, agent: str, reward: float) -> None:
    """The solution solves it, and nothing does not."""
    require_program("bwrap")
    box = 'agent.sandbox.kind="bwrap"'
    task = EXAMPLES / "harbor_task" / "task"
    ended = harness("run", "--harbor", task, "--agent", agent, "--set", box, "--json", "--out", tmp_path / "run")

    assert ended.code == 0, ended.stderr
    assert ended.document["scenarios"][0]["reward_mean"] == reward
