"""Reward models."""


async def async_rm(args, sample):
    """Of one sample: how many tokens it has."""
    return float(len(sample.tokens))
