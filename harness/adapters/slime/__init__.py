"""slime (interface of THUDM/slime 624b824a) over a session server.

    --custom-generate-function-path harness.adapters.slime.generate
    --dynamic-sampling-filter-path harness.adapters.slime.check_no_aborted
    --custom-convert-samples-to-train-data-path harness.adapters.slime.convert

slime shares miles' samples and state, so this wraps the miles adapter. Its options go into the `--custom-config-path`
file. See docs/embedding.md.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from harness.adapters.miles.generate import abort, close, open_rollouts, run_sample
from harness.adapters.miles.samples import require_fields
from harness.adapters.slime.convert import convert
from harness.adapters.step_reports import log_rollout
from harness.types import Json

__all__ = ["abort", "check_no_aborted", "close", "convert", "generate", "log_rollout"]


async def generate(args: Any, sample: Any, sampling_params: Json, evaluation: bool = False) -> Any:
    """Return a list of samples, or one if required.

    Raises `AdapterError` for unsupported settings, and first as `open_rollouts`: else slime would make groups forever.
    """
    from slime.rollout.sglang_rollout import GenerateState
    from slime.utils.misc import load_function

    require_fields(sample)
    state = GenerateState(args)
    await open_rollouts(state, load_function)
    scoring = "slime.rollout.rm_hub.async_rm"
    made = await run_sample(state, sample, sampling_params, load_function, scoring, is_one=evaluation)
    # In training an ABORTED sample has no reward: the filter drops its group, and a number would hide a missing filter.
    # An evaluation filters nothing and sums rewards, so there a failure counts 0.
    if evaluation:
        key = getattr(args, "eval_reward_key", None) or getattr(args, "reward_key", None)
        for each in _flatten([made]):
            if each.reward is None and _is_aborted(each):
                each.reward = {key: 0.0} if key else 0.0
    return made


def check_no_aborted(args: Any, samples: Sequence[Any], **_more: Any) -> Any:  # noqa: ARG001  # slime's signature
    """Drop groups with an ABORTED sample, for `--dynamic-sampling-filter-path`."""
    from slime.rollout.filter_hub.base_types import DynamicFilterOutput

    if any(_is_aborted(sample) for sample in _flatten(samples)):
        return DynamicFilterOutput(keep=False, reason="group_has_aborted")
    return DynamicFilterOutput(keep=True)


def _flatten(samples: Sequence[Any]) -> Iterator[Any]:
    for member in samples:
        yield from member if isinstance(member, list) else [member]


def _is_aborted(sample: Any) -> bool:
    return bool(sample.status is type(sample.status).ABORTED)
