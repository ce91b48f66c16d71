"""Reward models."""

import asyncio

from miles.utils.misc import load_function


async def async_rm(args, sample):
    """Of one sample: how many tokens it has, where no function is named."""
    rate = load_function(getattr(args, "custom_rm_path", None))
    return float(len(sample.tokens)) if rate is None else await rate(args, sample)


async def batched_async_rm(args, samples):
    """Of each sample; a function gets all of them."""
    rate = load_function(getattr(args, "custom_rm_path", None))
    if rate is not None:
        return await rate(args, samples)
    return await asyncio.gather(*(async_rm(args, sample) for sample in samples))
