"""Routed experts and sampling masks in the samples of trainers: where each takes them, and no missing one."""

import argparse
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from harness.adapters.miles import convert
from harness.adapters.slime import close as close_slime
from harness.adapters.slime import convert as convert_for_slime
from harness.engines.scripted import ScriptedEngine, ScriptStep, scripted_experts, scripted_masks
from harness.errors import AdapterError
from harness.types import GenerationRequest, TokenIds, VersionSpan, as_ids
from tests.builders import toy_tokenizer
from tests.session_servers.true_rows import ROUTER
from tests.unit.adapters import miles_agents
from tests.unit.adapters.miles_agents import Play
from tests.unit.adapters.miles_runs import miles_run
from tests.unit.adapters.test_areal import STEPS, crash, two_turns
from tests.unit.adapters.test_miles_generate import generate, generate_all, state_of
from tests.unit.adapters.test_slime import PARAMS, slime_args
from tests.unit.adapters.test_verl import PROMPT, output

pytestmark = pytest.mark.usefixtures("trainers")

TWO = (ScriptStep(text="One moment."), ScriptStep(text="Done."))
SLIME = "tests.unit.adapters.test_slime"
REPLAY = {"enable_rollout_routing_replay": True}


class ForgetfulEngine(ScriptedEngine):
    """Returns no rows with its second answer."""

    answers = 0

    def _route(self, request: GenerationRequest, output: TokenIds, spans: list[VersionSpan]) -> Any:
        self.answers += 1
        return None if self.answers == 2 else super()._route(request, output, spans)


@pytest.fixture(autouse=True)
def _play(monkeypatch: pytest.MonkeyPatch) -> None:
    play = Play()
    play.updates[1].set()
    monkeypatch.setattr(miles_agents, "play", play)


def true_experts(tokens: list[int]) -> npt.NDArray[Any]:
    """Those of all tokens but the last, under the first weights."""
    return scripted_experts(ROUTER, as_ids(tokens[:-1]), 0, "0")


async def test_miles_gets_the_experts_of_all_tokens_but_the_last() -> None:
    """As int32, from the first turn to the last; an evaluation records none."""
    async with miles_run(*TWO, use_rollout_routing_replay=True) as run:
        sample = await generate(state_of(run))
        evaluated = await generate_all(state_of(run), evaluation=True)

    sample.validate()
    [experts] = convert(run.args, [sample])["rollout_routed_experts"]
    assert (experts.dtype, sample.loss_mask.count(0) > 0) == (np.int32, True)
    assert np.array_equal(experts, true_experts(sample.tokens))
    assert evaluated.rollout_routed_experts is None


async def test_a_sample_of_miles_ends_before_the_first_missing_row() -> None:
    """Its other turn is in the ledger, by reason."""
    async with miles_run(*TWO, make_engine=ForgetfulEngine, use_rollout_routing_replay=True) as run:
        sample = await generate(state_of(run))

    ledger = sample.metadata["harness"]["ledger"]
    sample.validate()
    assert ledger["dropped"] == {"missing_rows": ledger["generated"] - sample.response_length}
    assert np.array_equal(sample.rollout_routed_experts, true_experts(sample.tokens))


@pytest.mark.parametrize("trainer", ["miles", "verl"])
async def test_replay_of_a_dense_model_is_refused_by_name(trainer: str) -> None:
    dense = partial(ScriptedEngine, routed_experts=None)
    async with miles_run(*TWO, make_engine=dense, use_rollout_routing_replay=True) as run:
        with pytest.raises(AdapterError, match="its engine returns no routed_experts"):
            await (generate(state_of(run)) if trainer == "miles" else output(run, two_turns, room=REPLAY))


@pytest.mark.xdist_group("torch")
async def test_slime_gets_experts_and_the_tokens_that_top_p_kept() -> None:
    """Its wish for them, `custom_params`, is the session's `record`; none of a token that nobody sampled."""
    from slime.rollout.sglang_rollout import generate_and_rm
    from slime.utils.types import Sample

    async with miles_run(*TWO) as run:
        args = argparse.Namespace(**vars(slime_args(run)), rollout_top_p=0.9, use_tis=True)
        args.use_rollout_routing_replay, args.custom_reward_post_process_path = True, f"{SLIME}.halve"
        wishes = {**PARAMS, "top_p": 0.9, "custom_params": {"return_top_p_token_ids": True}}
        origin = Sample(index=7, prompt=PROMPT, metadata={"index": 7, "group": 1})
        try:
            [sample] = await generate_and_rm(args, origin, wishes)
            evaluated = await generate_and_rm(args, origin, {**PARAMS, "top_p": 0.9}, evaluation=True)
        finally:
            await close_slime(args)

    columns = convert_for_slime(args, [sample])
    [experts], [ids] = columns["rollout_routed_experts"], columns["rollout_top_p_token_ids"]
    [offsets] = columns["rollout_top_p_token_offsets"]
    assert np.array_equal(experts, true_experts(sample.tokens))
    start = len(sample.tokens) - sample.response_length
    for at, token_id in enumerate(sample.tokens[start:]):
        true = scripted_masks(as_ids([token_id]), start + at, "0", toy_tokenizer().vocab_size)[0]
        assert ids[offsets[at] : offsets[at + 1]] == (true.tolist() if sample.loss_mask[at] else [])
    assert (evaluated.rollout_routed_experts, evaluated.rollout_top_p_token_ids) == (None, None)


async def test_verl_gets_the_experts_of_its_tokens() -> None:
    """Also of a response that its room cuts, and of a prompt whose beginning has no room."""
    async with miles_run(*STEPS) as run:
        whole = await output(run, two_turns, room=REPLAY)
        cut = await output(run, two_turns, room={"response_length": 4, **REPLAY})
        late = await output(run, two_turns, room={"prompt_length": len(whole.prompt_ids) - 1, **REPLAY})
        plain = await output(run, two_turns)

    true = true_experts(whole.prompt_ids + whole.response_ids)
    assert whole.routed_experts.dtype == np.int16
    assert np.array_equal(whole.routed_experts, true)
    assert np.array_equal(cut.routed_experts, true[: len(cut.prompt_ids) + 3])
    assert np.array_equal(late.routed_experts, true[1 : len(late.prompt_ids) + len(late.response_ids)])
    assert plain.routed_experts is None


async def test_an_output_of_verl_without_tokens_has_rows_of_the_models_shape() -> None:
    """Verl joins the rows of a batch; it replays none where nothing is trained."""
    async with miles_run(*STEPS) as run:
        made = await output(run, crash, room=REPLAY)

    assert (made.routed_experts.shape, made.response_mask) == ((1, ROUTER.layers, ROUTER.top_k), [0])
