"""The one state of a run, and a sample through its generate function."""

import inspect

from slime.utils.misc import load_function

_states = {}


class GenerateState:
    """One for all calls: the arguments of the first count."""

    def __new__(cls, args):
        if cls not in _states:
            _states[cls] = super().__new__(cls)
            _states[cls].aborted = False
        return _states[cls]

    def __init__(self, args):
        self.args = args
        self.tokenizer = args.tokenizer
        self.sampling_params = {}
        if getattr(args, "rollout_top_p", 1.0) != 1.0:
            self.sampling_params["custom_params"] = {"return_top_p_token_ids": True}


async def generate_and_rm(args, sample, sampling_params, evaluation=False):
    """One sample."""
    generate = load_function(args.custom_generate_function_path)
    if "evaluation" in inspect.signature(generate).parameters:
        return await generate(args, sample, sampling_params, evaluation=evaluation)
    return await generate(args, sample, sampling_params)
