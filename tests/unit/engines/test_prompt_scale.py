"""Which sampled logprobs may stand beside those that an engine gives its input."""

from dataclasses import replace

import pytest

from harness.engines.base import LogprobScale, is_on_prompt_scale
from harness.types import SamplingParams

PLAIN = SamplingParams(max_new_tokens=10)


@pytest.mark.parametrize(
    ("params", "raw", "after_temperature"),
    [
        (PLAIN, True, True),
        (replace(PLAIN, temperature=0.7), True, False),
        (replace(PLAIN, min_new_tokens=2), False, False),
        (replace(PLAIN, json_schema="{}"), False, False),
    ],
)
def test_what_was_left_out_before_sampling_is_in_no_plain_forward_pass(params, raw, after_temperature):
    """An input is scored as it is; a sampled token only among those that were not forbidden."""
    assert is_on_prompt_scale(LogprobScale.RAW, params) is raw
    assert is_on_prompt_scale(LogprobScale.AFTER_TEMPERATURE, params) is after_temperature
