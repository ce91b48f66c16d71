"""slime (interface of THUDM/slime 624b824a) over a session server.

    --custom-generate-function-path harness.adapters.slime.generate

slime and miles share their samples and their state, so this is the adapter of miles, called as slime calls. slime asks
nobody for options: those of the adapter are in the file of `--custom-config-path`. See docs/embedding.md.
"""

from typing import Any

from harness.adapters.miles.generate import abort, close, run_sample
from harness.types import Json

__all__ = ["abort", "close", "generate"]


async def generate(args: Any, sample: Any, sampling_params: Json) -> Any:
    """The sample, or the list of samples with a selection of several. Raises `AdapterError` for what cannot be kept."""
    from slime.rollout.sglang_rollout import GenerateState
    from slime.utils.misc import load_function

    return await run_sample(GenerateState(args), sample, sampling_params, load_function)
