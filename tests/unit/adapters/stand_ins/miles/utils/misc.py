"""Functions by their paths."""

import importlib


def load_function(path):
    """What `path` names; None for none."""
    if not path:
        return None
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


async def call_agent_abort_hook(args):
    """Ask the module of the agent function for its `abort`, where it has one."""
    module = args.custom_agent_function_path.rpartition(".")[0]
    try:
        hook = load_function(f"{module}.abort")
    except AttributeError:
        return
    await hook(args)
