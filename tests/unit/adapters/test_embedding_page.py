"""The examples of trainers and of docs/embedding.md, executed as they stand."""

import asyncio
import json
import re
import sys
from importlib import import_module
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest

from harness.adapters.miles.settings import NO_LISTS, REFUSALS
from harness.adapters.verl import close
from harness.engines.scripted import ScriptStep
from tests.checkout import ROOT
from tests.conformance.agents.parts import tool_call
from tests.unit.adapters.miles_runs import miles_args, miles_run
from tests.unit.adapters.verl_runs import verl_config

EXAMPLES = ROOT / "examples"
PAGE = (ROOT / "docs" / "embedding.md").read_text(encoding="utf-8")
STEPS = (ScriptStep(text="It is 41."), ScriptStep(text="No, 42."), ScriptStep(text="42"))
CALL = tool_call("multiply", {"a": 6, "b": 7})
ROW = {"messages": [{"role": "user", "content": "6 x 7?"}], "answer": "42"}


def blocks(section: str, language: str) -> list[str]:
    """The blocks in that language below the heading of that name."""
    [text] = [text for text in PAGE.split("\n## ") if text.startswith(f"{section}\n")]
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


@pytest.fixture(autouse=True)
def _each_example_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two examples have a `sure_agent`."""
    for name in ("sure_agent", "train", "tool_agent"):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.usefixtures("trainers")
async def test_the_example_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its options, its agent, a sample of a data set: a reward, and columns for the trainer."""
    from miles.rollout.base_types import GenerateFnInput
    from miles.rollout.inference_rollout.inference_rollout_common import GenerateState
    from miles.utils.types import Sample

    from harness.adapters.miles import convert

    monkeypatch.syspath_prepend(EXAMPLES / "miles")
    options = (EXAMPLES / "miles" / "options.txt").read_text(encoding="utf-8")
    shown = dict(line.split(" ", 1) for line in options.splitlines())
    paths = {name[2:].replace("-", "_"): path for name, path in shown.items() if name.endswith("-path")}
    async with miles_run(*STEPS, options=("--max-seq-len", shown["--max-seq-len"]), **paths) as run:
        assert run.args.custom_generate_function_path == "harness.adapters.miles.Generate"
        state = GenerateState(run.args)
        sample = Sample(
            index=0, group_index=0, prompt=[{"role": "user", "content": "6 x 7?"}], metadata={"answer": "42"}
        )
        [made] = (await state.generate_function(GenerateFnInput(state, sample, state.sampling_params, False))).samples
        columns = convert(run.args, [made])

    made.validate()
    assert (made.status.value, made.reward, made.metadata["harness"]["turns"]) == ("completed", 1.0, [0, 1, 2])
    assert len(columns["proximal_log_probs"][0]) == made.response_length


@pytest.mark.usefixtures("trainers")
async def test_the_example_runs_without_the_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same file under miles' own generate function, by the configuration of the page: it finds our server."""
    from miles.rollout.base_types import GenerateFnInput
    from miles.rollout.inference_rollout.inference_rollout_common import GenerateState
    from miles.utils.types import Sample

    monkeypatch.syspath_prepend(EXAMPLES / "miles")
    [shown] = blocks("miles", "yaml")
    changes = {
        "custom_generate_function_path": "miles.rollout.generate_hub.agentic_tool_call.generate",
        "custom_agent_function_path": "sure_agent.run",
    }
    async with miles_run(*STEPS, **changes) as run:
        server = urlsplit(run.server.url)
        for line in shown.replace("[8000]", f"[{server.port}]").splitlines():
            name, value = line.split(": ")
            setattr(run.args, name, value if name == "session_server_ip" else json.loads(value))
        state = GenerateState(run.args)
        sample = Sample(index=0, prompt=ROW["messages"], metadata={"answer": "42"})
        made = (await state.generate_function(GenerateFnInput(state, sample, state.sampling_params, False))).samples

    made.validate()
    assert (made.status.value, made.metadata["reward"]) == ("completed", 1.0)
    assert 0 < sum(made.loss_mask) < made.response_length


@pytest.mark.xdist_group("torch")
@pytest.mark.usefixtures("trainers")
async def test_the_example_of_areal_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its agent and its script, in a loop of AReaL's own: a trajectory, which AReaL's checks let pass."""
    from areal import PPOTrainer

    monkeypatch.syspath_prepend(EXAMPLES / "areal")
    async with miles_run(*STEPS) as run:
        monkeypatch.setenv("SESSION_SERVER", run.server.url)
        await asyncio.to_thread(import_module("train").train, None, [ROW])

    [made] = PPOTrainer.trajectories
    assert made["rewards"].tolist() == [1.0]
    assert made["loss_mask"].sum() == (made["versions"] == 0).sum() > 0


@pytest.mark.usefixtures("trainers")
async def test_the_example_of_verl_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file, its options and its agent, which calls a tool: an output, which verl's padding takes."""
    from verl.experimental.agent_loop.agent_loop import run_agent_loop

    monkeypatch.syspath_prepend(EXAMPLES / "verl")
    file, options = ((EXAMPLES / "verl" / name).read_text() for name in ("session_agent.yaml", "overrides.txt"))
    loop_config = dict(line.removeprefix("- ").strip().split(": ", 1) for line in file.splitlines())
    assert f"default_agent_loop={loop_config['name']}" in options
    async with miles_run(CALL, STEPS[-1]) as run:
        loop_config["session_server"] = run.server.url
        try:
            made = await run_agent_loop(
                loop_config,
                verl_config(prompt_length=2048),
                SimpleNamespace(eos_token_id=2),
                {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True},
                raw_prompt=ROW["messages"],
                extra_info={"answer": "42"},
            )
        finally:
            await close()

    assert (made.reward_score, made.num_turns, set(made.response_mask)) == (1.0, 4, {0, 1})


def test_every_option_is_on_the_page() -> None:
    """Those of the adapter, and those that it refuses."""
    ours = [name for name in vars(miles_args()) if name.startswith("harness_")]
    options = [f"--{name.replace('_', '-')}" for name in ours] + [refusal.option for refusal in (*REFUSALS, *NO_LISTS)]
    assert [option for option in options if f"`{option}`" not in PAGE] == []
