"""The example of docs/embedding.md, executed as it stands."""

import re
from pathlib import Path

import pytest

from harness.adapters.miles.settings import REFUSALS
from harness.engines.scripted import ScriptStep
from tests.checkout import ROOT
from tests.unit.adapters.miles_runs import miles_args, miles_run

PAGE = (ROOT / "docs" / "embedding.md").read_text(encoding="utf-8")


def block(language: str) -> str:
    """The only block of the page in that language."""
    [text] = re.findall(rf"^```{language}\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)
    return text


@pytest.mark.usefixtures("miles")
async def test_the_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its options, its agent, a sample of a data set: a reward, and columns for the trainer."""
    from miles.rollout.base_types import GenerateFnInput
    from miles.rollout.inference_rollout.inference_rollout_common import GenerateState
    from miles.utils.types import Sample

    from harness.adapters.miles import convert

    (tmp_path / "sure_agent.py").write_text(block("python"))
    monkeypatch.syspath_prepend(tmp_path)
    shown = dict(line.split(" ", 1) for line in block("text").splitlines())
    paths = {name[2:].replace("-", "_"): path for name, path in shown.items() if name.endswith("-path")}
    steps = (ScriptStep(text="It is 41."), ScriptStep(text="No, 42."), ScriptStep(text="42"))
    async with miles_run(*steps, options=("--max-seq-len", shown["--max-seq-len"]), **paths) as run:
        assert run.args.custom_generate_function_path == "harness.adapters.miles.Generate"
        state = GenerateState(run.args)
        sample = Sample(
            index=0, group_index=0, prompt=[{"role": "user", "content": "6 x 7?"}], metadata={"answer": "42"}
        )
        made = (await state.generate_function(GenerateFnInput(state, sample, state.sampling_params, False))).samples
        columns = convert(run.args, [made])

    made.validate()
    assert (made.status.value, made.reward, made.metadata["harness"]["turns"]) == ("completed", 1.0, [0, 1, 2])
    assert len(columns["proximal_log_probs"][0]) == made.response_length


def test_every_option_is_on_the_page() -> None:
    """Those of the adapter, and those that it refuses."""
    ours = [name for name in vars(miles_args()) if name.startswith("harness_")]
    options = [f"--{name.replace('_', '-')}" for name in ours] + [refusal.option for refusal in REFUSALS]
    assert [option for option in options if f"`{option}`" not in PAGE] == []
