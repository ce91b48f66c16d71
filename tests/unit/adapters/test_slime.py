"""One sample of slime, and the facts of THUDM/slime 624b824a that the adapter stands on.

`HARNESS_SLIME_SRC` names a checkout, which is read without importing it.
"""

import argparse
import ast
import asyncio
import os
import sys
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest

from harness.adapters.miles.convert import COLUMNS
from harness.adapters.miles.samples import FIELDS
from harness.adapters.slime import check_no_aborted, close, convert
from harness.adapters.slime.convert import METHOD, READ
from harness.engines.scripted import ScriptedFault, ScriptStep
from harness.errors import AdapterError, SessionServerError
from tests.session_servers.served import eventually
from tests.unit.adapters import miles_agents
from tests.unit.adapters.conftest import STAND_INS
from tests.unit.adapters.miles_agents import Play
from tests.unit.adapters.miles_runs import AGENTS, MilesRun, miles_run

CHECKOUT = os.environ.get("HARNESS_SLIME_SRC")
SOURCES = [STAND_INS, *([Path(CHECKOUT)] if CHECKOUT else [])]
PROMPT = [{"role": "user", "content": "Do it."}]
PARAMS = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 100, "stop": None, "no_stop_trim": True}


def slime_args(run: MilesRun) -> argparse.Namespace:
    """Those of the adapter as a configuration file states them: the others were never declared."""
    return argparse.Namespace(
        custom_generate_function_path="harness.adapters.slime.generate",
        custom_agent_function_path=f"{AGENTS}.run",
        harness_session_server=run.server.url,
        tokenizer=run.args.tokenizer,
    )


def halve(args: argparse.Namespace, samples: list[Any]) -> tuple[list[float], list[float]]:
    """Rewards as a run may process them."""
    return [sample.reward for sample in samples], [sample.reward / 2 for sample in samples]


@pytest.mark.xdist_group("torch")
@pytest.mark.usefixtures("trainers")
async def test_an_episode_of_slime_and_an_abort(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample comes back whole; one that the end of a step meets comes back ABORTED."""
    from slime.rollout.sglang_rollout import GenerateState, generate_and_rm
    from slime.utils.types import Sample

    play = Play()
    play.updates[1].set()
    monkeypatch.setattr(miles_agents, "play", play)
    hangs = ScriptStep(text="An answer.", fault=ScriptedFault.HANG, fault_after=3)
    async with miles_run(ScriptStep(text="One moment."), ScriptStep(text="Done."), hangs) as run:
        args = slime_args(run)
        try:
            whole = Sample(index=7, prompt=PROMPT, label="42", metadata={"index": 7, "group": 1})
            [whole] = await generate_and_rm(args, whole, dict(PARAMS))
            endless = Sample(index=8, prompt=PROMPT, metadata={"index": 8, "group": miles_agents.ENDLESS})
            going = asyncio.create_task(generate_and_rm(args, endless, dict(PARAMS)))
            await eventually(lambda: any(live.sampled for live in run.engine.live))
            GenerateState(args).aborted = True
            [cut] = await going
            GenerateState(args).aborted = False
            with pytest.raises(AdapterError, match="'custom_params' is not supported"):
                await generate_and_rm(args, whole, {**PARAMS, "custom_params": {"return_top_p_token_ids": True}})
        finally:
            await close(args)

    from slime.ray.rollout import convert_of

    args.custom_convert_samples_to_train_data_path = "harness.adapters.slime.convert"
    args.custom_reward_post_process_path = f"{__name__}.halve"
    columns = convert_of(args, [whole])
    assert (columns["rewards"], columns["raw_reward"], columns["tokens"]) == ([0.5], [1.0], [whole.tokens])
    assert columns["proximal_log_probs"] == [whole.train_metadata["proximal_log_probs"]]
    assert (whole.status.value, whole.reward, whole.label) == ("completed", 1.0, "42")
    assert len(whole.loss_mask) == len(whole.rollout_log_probs) == whole.response_length > 0
    assert len(whole.train_metadata["proximal_log_probs"]) == whole.response_length
    assert (cut.status.value, play.statuses[8][-1]) == ("aborted", 404)


@pytest.mark.usefixtures("trainers")
async def test_a_group_with_an_agent_that_failed_is_filtered_out() -> None:
    """Its samples have no reward, which slime could not make a tensor of; in an evaluation, without filters, 0.

    Where no sample could be made at all, the run ends.
    """
    from slime.rollout.sglang_rollout import generate_and_rm
    from slime.utils.types import Sample

    async with miles_run(ScriptStep(text="Done.")) as run:
        args = slime_args(run)
        args.custom_agent_function_path = f"{AGENTS}.crash"
        nowhere = argparse.Namespace(**{**vars(args), "harness_session_server": "http://127.0.0.1:9"})
        try:
            with pytest.raises(SessionServerError, match=r"127\.0\.0\.1:9"):
                await generate_and_rm(nowhere, Sample(index=7, prompt=PROMPT), dict(PARAMS))
            await close(nowhere)
            [failed], evaluated = [
                await generate_and_rm(args, Sample(index=7, prompt=PROMPT), dict(PARAMS), evaluation)
                for evaluation in (False, True)
            ]
        finally:
            await close(args)

    whole = Sample(status=Sample.Status.COMPLETED, reward=1.0)
    assert [(each.status.value, each.reward) for each in (failed, evaluated)] == [("aborted", None), ("aborted", 0.0)]
    assert check_no_aborted(args, [whole, [whole, failed]]).reason == "group_has_aborted"
    assert [check_no_aborted(args, group).keep for group in ([whole, failed], [whole, [whole]])] == [False, True]


@pytest.mark.parametrize("source", SOURCES, ids=str)
def test_the_facts_of_slime(source: Path) -> None:
    """The fields of a sample, the state's, and how a generate function is called."""
    types = ast.parse((source / "slime/utils/types.py").read_text(encoding="utf-8"))
    sample = next(node for node in types.body if isinstance(node, ast.ClassDef) and node.name == "Sample")
    fields = {each.target.id for each in sample.body if isinstance(each, ast.AnnAssign)}
    rollout = (source / "slime/rollout/sglang_rollout.py").read_text(encoding="utf-8")
    filters = (source / "slime/rollout/filter_hub/base_types.py").read_text(encoding="utf-8")
    assert fields >= FIELDS | {"rollout_top_p_token_ids", "rollout_top_p_token_offsets"}
    assert '["custom_params"] = {"return_top_p_token_ids": True}' in rollout
    assert "keep: bool\n    reason: str | None = None\n" in filters
    assert "evaluation=evaluation)" in rollout
    assert "class GenerateState" in rollout
    assert "(args, sample, sampling_params)" in rollout
    for attribute in ("self.args", "self.tokenizer", ".aborted"):
        assert f"{attribute} = " in rollout


@pytest.mark.parametrize("source", SOURCES, ids=str)
def test_slimes_columns_are_made_of_what_the_adapter_gives(source: Path) -> None:
    """The method reads these attributes of its actor, and no others."""
    tree = ast.parse((source / "slime/ray/rollout.py").read_text(encoding="utf-8"))
    methods = [node for node in ast.walk(tree) if getattr(node, "name", None) in (METHOD, "_post_process_rewards")]
    read = {
        node.attr
        for method in methods
        for node in ast.walk(method)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    }
    assert (len(methods), read) == (2, READ)


@pytest.mark.xdist_group("torch")
@pytest.mark.usefixtures("trainers")
@pytest.mark.parametrize("source", SOURCES, ids=str)
def test_a_rollout_with_several_samples_counts_once(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the mean of its group and in the loss, by slime's own columns; alone, slime would take all for one group."""
    monkeypatch.syspath_prepend(source)
    from slime.utils.types import Sample

    module = ModuleType("slime.ray.rollout")
    module.__dict__.update(RolloutManager=columns_of(source, Sample))
    monkeypatch.setitem(sys.modules, "slime.ray.rollout", module)
    args = argparse.Namespace(
        custom_reward_post_process_path=None,
        advantage_estimator="grpo",
        reward_key=None,
        rewards_normalization=True,
        grpo_std_normalization=False,
        n_samples_per_prompt=2,
        rollout_batch_size=2,
    )
    given = [(0, 0, 0, 1.0, 3), (0, 0, 0, 1.0, 1), (0, 0, 0, 1.0, 2), (0, 1, None, 0.0, 5)]
    given += [(1, 2, None, 4.0, 2), (1, 3, 3, 8.0, 1), (1, 3, 3, 8.0, 1)]
    samples = [Given(*each).make(Sample) for each in given]
    columns = convert(args, samples)
    assert columns["rewards"] == pytest.approx([0.5, 0.5, 0.5, -0.5, -2.0, 2.0, 2.0])
    assert columns["raw_reward"] == [1.0, 1.0, 1.0, 0.0, 4.0, 8.0, 8.0]
    args.grpo_std_normalization = True
    assert convert(args, samples)["rewards"] == pytest.approx(
        [2**-0.5] * 3 + [-(2**-0.5)] * 2 + [2**-0.5] * 2, rel=1e-4
    )
    if source is not STAND_INS:
        assert columns["rollout_mask_sums"] == [6, 6, 6, 5, 2, 2, 2]
    samples[1].reward = 0.0
    with pytest.raises(AdapterError, match=r"^rollout 0: expected one reward for its samples, got 1\.0 and 0\.0$"):
        convert(args, samples)


@pytest.mark.parametrize("name", ["teacher_log_probs", "rollout_routed_experts"])
def test_a_step_that_has_a_column_in_part_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else slime would train it without its teacher, or on a column with holes, as the first sample is."""
    monkeypatch.syspath_prepend(STAND_INS)
    from slime.utils.types import Sample

    unscored, scored = [Given(0, index, None, 1.0, 2).make(Sample) for index in (1, 2)]
    setattr(scored, name, np.ones((2, 1, 1), np.int32))
    for samples in ([unscored, scored], [scored, unscored]):
        with pytest.raises(AdapterError, match=f"sample 1: expected {name}, as sample 2 has, got none"):
            convert(argparse.Namespace(), samples)


class Given(NamedTuple):
    """A sample with so many trained tokens."""

    group: int
    index: int
    rollout: int | None
    reward: float
    size: int

    def make(self, kind: Any) -> Any:
        """The sample, as the adapter makes it."""
        zeros = dict.fromkeys(COLUMNS, [0] * self.size)
        return kind(
            group_index=self.group,
            index=self.index,
            rollout_id=self.rollout,
            reward=self.reward,
            tokens=[1] * (self.size + 2),
            response_length=self.size,
            loss_mask=[1] * self.size,
            rollout_log_probs=[0.0] * self.size,
            train_metadata=zeros,
        )


def columns_of(source: Path, sample: Any) -> Any:
    """A class with the methods that make columns, of that source; the rest of its module starts engines."""
    import torch

    tree = ast.parse((source / "slime/ray/rollout.py").read_text(encoding="utf-8"))
    methods = [node for node in ast.walk(tree) if getattr(node, "name", None) in (METHOD, "_post_process_rewards")]
    for method in methods:
        method.decorator_list = []
    names: dict[str, Any] = {"Sample": sample, "torch": torch}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("slime.utils."):
            with suppress(ImportError):
                exec(compile(ast.Module([node], []), str(source), "exec"), names)
    exec(compile(ast.Module(methods, []), str(source), "exec"), names)
    return type("RolloutManager", (), {method.name: names[method.name] for method in methods})
