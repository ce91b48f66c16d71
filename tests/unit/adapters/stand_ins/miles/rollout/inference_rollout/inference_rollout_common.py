"""Groups of samples, and the state that they share."""

import asyncio
import inspect
from copy import deepcopy

from miles.rollout.base_types import GenerateFnInput
from miles.rollout.rm_hub import async_rm, batched_async_rm
from miles.utils.misc import load_function
from miles.utils.types import Sample


def compute_sampling_params(args, *, temperature, top_p, top_k, max_new_tokens):
    """Those of every request."""
    return dict(  # noqa: C408  # a call, as in miles
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        max_new_tokens=max_new_tokens,
        stop=args.rollout_stop,
        stop_token_ids=args.rollout_stop_token_ids,
        skip_special_tokens=args.rollout_skip_special_tokens,
        no_stop_trim=True,
        spaces_between_special_tokens=False,
    )


class GenerateState:
    """What the samples of a run share."""

    def __init__(self, args):
        self.args = args
        self.tokenizer = args.tokenizer
        self.generate_fn_semaphore = asyncio.Semaphore(args.concurrency)
        self.sampling_params = compute_sampling_params(
            args,
            temperature=args.rollout_temperature,
            top_p=args.rollout_top_p,
            top_k=args.rollout_top_k,
            max_new_tokens=args.rollout_max_response_len,
        )
        found = load_function(args.custom_generate_function_path)
        self.generate_function = found() if inspect.isclass(found) else found
        self.reset()

    def reset(self):
        self.aborted = False


async def generate_and_rm(state, sample, sampling_params, evaluation=False):
    """One sample and its reward."""
    async with state.generate_fn_semaphore:
        if state.aborted:
            sample.status = Sample.Status.ABORTED
            return sample
        given = GenerateFnInput(state, sample, deepcopy(sampling_params), evaluation)
        sample = (await state.generate_function(given)).samples
    if isinstance(sample, list):
        if any(each.status is Sample.Status.ABORTED for each in sample):
            return sample
        unscored = [each for each in sample if each.reward is None]
        for each, reward in zip(unscored, await batched_async_rm(state.args, unscored), strict=True):
            each.reward = reward
    elif sample.status is not Sample.Status.ABORTED and sample.reward is None:
        sample.reward = await async_rm(state.args, sample)
    return sample


async def generate_and_rm_group(state, group, sampling_params, evaluation=False):
    """A group; one that raises costs the group."""
    if state.aborted:
        return group
    return await asyncio.gather(
        *(asyncio.create_task(generate_and_rm(state, each, sampling_params.copy(), evaluation)) for each in group)
    )


class InferenceRolloutFn:
    """A step by its id."""

    def __init__(self, given):
        self.data_source = given.data_source
        self.state = GenerateState(given.args)

    async def __call__(self, given):
        from miles.rollout.base_types import RolloutFnTrainOutput
        from miles.rollout.inference_rollout.inference_rollout_train import generate_rollout_async

        data, _ = await generate_rollout_async(self.state, given.rollout_id, self.data_source.get_samples)
        return RolloutFnTrainOutput(samples=data)
