"""A prompt that makes the model of the tests loop under greedy decoding: every engine must end it at the same token.

It says the same two tokens for ever. Along the way its best candidate is at least 0.4 nats ahead of the second one, far
more than float32 engines differ by.
"""

from dataclasses import replace

from server_patch.repeat_terminate import RepeatTerminateConfig

PROMPT = "<|im_start|>user\nChant: we will rock you!<|im_end|>\n<|im_start|>assistant\n"
PROMPT_IDS = [1, 4093, 198, 2083, 403, 42, 392, 523, 4022, 346, 17, 2, 198, 1, 520, 9531, 198]
"""`PROMPT`, encoded."""

CONFIG = RepeatTerminateConfig(
    enabled=True, min_new_tokens=32, max_consecutive_token_repeats=16, ngram_size=16, ngram_repeats=2
)

HEAD_IDS = (365, 28, 284, 339, 339, 28, 284, 339)
LOOP_IDS = (28, 284)
"""What the output begins with, and what it then repeats."""

LOOP_START, PERIOD = len(HEAD_IDS), len(LOOP_IDS)
"""Output tokens from `LOOP_START` on repeat every `PERIOD`."""

STOP_INDEX = LOOP_START + CONFIG.ngram_size * CONFIG.ngram_repeats - 1
"""Index of the last output token with `CONFIG`: the sixteen tokens up to it are those before them."""

MAX_NEW_TOKENS = 128
"""Without the guard the output is this long."""

OTHER_PROMPTS = ("Say something.", "Write a poem about the sea.", "What is a lighthouse for?")
"""What others in the batch are asked, with seeds of their own."""

SERVED_CONFIG = replace(CONFIG, max_consecutive_token_repeats=144, ngram_repeats=9, max_object_keys=40)
"""Of the real servers that all tests share: no output of fewer than 144 tokens trips it, but one of 40 object keys."""

SERVED_STOP_AFTER = LOOP_START + SERVED_CONFIG.ngram_size * SERVED_CONFIG.ngram_repeats
"""Output tokens with `SERVED_CONFIG`."""


def looped_ids(count: int) -> list[int]:
    """The first `count` tokens of the output."""
    return [*HEAD_IDS, *LOOP_IDS * (count // PERIOD)][:count]
