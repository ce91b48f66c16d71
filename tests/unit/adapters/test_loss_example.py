"""The loss of docs/embedding.md on a batch whose weights changed in the middle of its samples."""

import asyncio
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from harness.adapters.miles import convert
from harness.engines.scripted import ScriptStep
from harness.training.learner.learner import LossSettings
from tests.session_servers.served import eventually
from tests.unit.adapters import miles_agents
from tests.unit.adapters.miles_agents import Play
from tests.unit.adapters.miles_runs import MilesRun, miles_run
from tests.unit.adapters.test_embedding_page import blocks

pytestmark = pytest.mark.xdist_group("torch")

STORY = ScriptStep(text="and then " * 4, token_delay_s=0.05)
CLIP = SimpleNamespace(eps_clip=0.2, eps_clip_high=0.3)


async def samples_of(run: MilesRun, play: Play) -> list[Any]:
    """Two samples whose second turn is cut by an update: it began under version 0 and ends under version 1."""
    from miles.rollout.base_types import GenerateFnInput
    from miles.rollout.inference_rollout.inference_rollout_common import GenerateState
    from miles.utils.types import Sample

    async def update() -> None:
        await eventually(lambda: play.first == 2)
        play.updates[1].set()
        await eventually(lambda: sum(live.sampled > 3 for live in run.engine.live) == 2)
        await run.update(1)

    state = GenerateState(run.args)
    prompt = [{"role": "user", "content": "Tell."}]
    given = [Sample(index=i, group_index=0, prompt=prompt, metadata={"index": i, "group": 1}) for i in (0, 1)]
    requests = [GenerateFnInput(state, sample, dict(state.sampling_params), False) for sample in given]
    *made, _ = await asyncio.gather(*(state.generate_function(request) for request in requests), update())
    return [sample for each in made for sample in each.samples]


def batch_of(columns: dict[str, list[Any]], advantages: list[float]) -> dict[str, Any]:
    """What miles makes of the columns before a loss sees them."""
    import torch

    batch: dict[str, Any] = {
        name: [torch.tensor(column, dtype=torch.float32) for column in columns[name]]
        for name in ("rollout_log_probs", "proximal_log_probs", "loss_masks")
    }
    batch["unconcat_tokens"] = [torch.tensor(tokens) for tokens in columns["tokens"]]
    batch["total_lengths"] = [len(tokens) for tokens in columns["tokens"]]
    batch["response_lengths"] = columns["response_lengths"]
    lengths = zip(advantages, columns["response_lengths"], strict=True)
    batch["advantages"] = [torch.full((length,), advantage) for advantage, length in lengths]
    return batch


@pytest.mark.usefixtures("trainers")
async def test_the_loss_is_decoupled_ppo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum that the learner of this project finds; a token without a proximal value has weight 1."""
    import torch

    from harness.training.learner.losses import TrainedTokens, decoupled_ppo

    play = Play()
    monkeypatch.setattr(miles_agents, "play", play)
    [source] = blocks("miles", "python")
    (tmp_path / "decoupled_ppo.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    async with miles_run(ScriptStep(text="One moment."), STORY) as run:
        columns = convert(run.args, await samples_of(run, play))
        vocabulary = max(max(tokens) for tokens in columns["tokens"]) + 1
    batch = batch_of(columns, [1.0, -0.5])
    names = ("rollout_log_probs", "proximal_log_probs", "behavior_versions", "proximal_versions")
    flat = {name: torch.tensor(np.concatenate(columns[name])) for name in names}
    mask = torch.cat(batch["loss_masks"])
    logits = torch.randn(
        (1, sum(batch["total_lengths"]), vocabulary), generator=torch.Generator().manual_seed(7), requires_grad=True
    )

    from miles.backends.training_utils.loss_hub.logit_processors import get_log_probs_and_entropy

    policy_loss = import_module("decoupled_ppo").policy_loss
    loss, figures = policy_loss(CLIP, batch, logits, lambda per_token: (per_token * mask).sum())
    [gradient] = torch.autograd.grad(loss, logits)

    lengths = {name: batch[name] for name in ("unconcat_tokens", "total_lengths", "response_lengths")}
    current = torch.cat(get_log_probs_and_entropy(logits, args=None, **lengths)["log_probs"])
    trained = mask == 1
    tokens = TrainedTokens(
        current[trained],
        flat["rollout_log_probs"].float()[trained],
        flat["proximal_log_probs"].float()[trained],
        torch.cat(batch["advantages"])[trained],
        torch.ones(int(trained.sum()), dtype=torch.bool),
    )
    ours = decoupled_ppo(tokens, LossSettings(kind="decoupled_ppo", clip_low=0.2, clip_high=0.3, weight_cap=5.0))
    torch.testing.assert_close(loss, ours.loss.sum())
    torch.testing.assert_close(gradient, torch.autograd.grad(ours.loss.sum(), logits)[0])
    torch.testing.assert_close(figures["behavior_weight"], ours.weight.sum())
    has_met = (flat["proximal_versions"] != flat["behavior_versions"])[trained]
    weight = (tokens.proximal_logprobs - tokens.behavior_logprobs).exp()
    assert 0 < has_met.sum() < len(has_met)
    assert (weight[~has_met] == 1).all()
    assert (weight[has_met] != 1).any()
