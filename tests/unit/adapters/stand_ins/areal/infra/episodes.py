"""One episode, as AReaL runs it."""

import importlib

import torch

from areal.api import RolloutWorkflow


def resolve_workflow(workflow, workflow_kwargs):
    """The workflow that a path names; anything else is an agent that AReaL would run through a proxy of its own."""
    module, _, name = workflow.rpartition(".")
    found = getattr(importlib.import_module(module), name)
    if not (isinstance(found, type) and issubclass(found, RolloutWorkflow)):
        raise ValueError("proxy_addr is required for agent workflows")  # noqa: TRY004  # as AReaL
    return found(**workflow_kwargs)


async def run_episode(workflow, engine, data):
    """The trajectory, after AReaL's own checks."""
    made = await workflow.arun_episode(engine, data)
    if made is not None:
        assert made.keys() >= {"input_ids", "attention_mask"}
        size, length = made["input_ids"].shape
        for name, column in made.items():
            assert torch.is_tensor(column), name
            assert column.shape in ((size,), (size, length)), name
    return made
