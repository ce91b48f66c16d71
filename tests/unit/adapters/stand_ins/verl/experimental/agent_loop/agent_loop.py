"""Agent loops, and the worker that awaits one for each sample."""

import importlib
from typing import Any

from pydantic import BaseModel


class AgentLoopMetrics(BaseModel):
    """Seconds."""

    generate_sequences: float = 0.0
    tool_calls: float = 0.0
    compute_score: float = 0.0
    num_preempted: int = -1


class AgentLoopOutput(BaseModel):
    """What a loop makes of a sample."""

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    response_logprobs: list[float] | None = None
    routed_experts: Any = None
    reward_score: float | None = None
    num_turns: int = 0
    metrics: AgentLoopMetrics
    extra_fields: dict[str, Any] = {}


class _Wrap:
    def __init__(self, config):
        self.config = config


async def run_agent_loop(loop_config, config, tokenizer, sampling_params, **fields):
    """One sample, with the checks of verl's padding."""
    given = dict(loop_config)  # its name is an argument, too: hydra hands over the whole item
    module, _, name = given.pop("_target_").rpartition(".")
    loop = getattr(importlib.import_module(module), name)(
        trainer_config=_Wrap(config),
        server_manager=object(),
        tokenizer=tokenizer,
        processor=None,
        hf_model_type="qwen3",
        dataset_cls=object,
        data_config=_Wrap({}),
        tools=object(),
        **given,
    )
    output = await loop.run(sampling_params, **fields)
    rollout = config.actor_rollout_ref.rollout
    assert isinstance(output, AgentLoopOutput) or ("session_id" in fields and len(output) > 1)  # a list for the queue
    for each in output if isinstance(output, list) else [output]:
        assert 1 <= len(each.prompt_ids) <= rollout.prompt_length
        assert 1 <= len(each.response_ids) <= rollout.response_length
        assert len(each.response_mask) == len(each.response_logprobs) == len(each.response_ids)
        if getattr(rollout, "enable_rollout_routing_replay", False):  # one shape for all outputs of a batch
            assert each.routed_experts.shape[0] == len(each.prompt_ids) + len(each.response_ids) - 1
        int(each.extra_fields["min_global_steps"]), int(each.extra_fields["max_global_steps"])
        assert each.extra_fields["reward_extra_info"] == {}  # that of the last one becomes that of all
    return output
