"""The guard in a scheduler: what it makes of outputs that grow by several tokens, shrink, or begin before a joint."""

from collections.abc import Sequence
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server_patch.repeat_terminate import RepeatDetector, RepeatTerminateConfig
from server_patch.repeat_terminate.attach import Guard, Watch
from server_patch.repeat_terminate.signals import prefix_length, probe_answer, probed_digest

CONFIG = RepeatTerminateConfig(
    enabled=True, min_new_tokens=3, max_consecutive_token_repeats=4, ngram_size=2, ngram_repeats=3
)
GUARD = Guard(CONFIG, CONFIG.digest())

tokens = st.lists(st.integers(0, 2), max_size=40)
steps = st.lists(st.integers(0, 6), max_size=60)
"""How many tokens each step of the engine adds."""


def watched(output: Sequence[int], step_sizes: Sequence[int], watch: Watch) -> int | None:
    """The hit that `watch` reports first, shown `output` as it grows."""
    sizes = [*(min(size, len(output)) for size in accumulate(step_sizes)), len(output)]
    return next((hit for size in sizes if (hit := watch.hit(output[:size])) is not None), None)


@given(tokens, steps)
def test_steps_of_any_size_end_an_output_at_one_token(output: list[int], step_sizes: list[int]) -> None:
    """Speculative decoding accepts several tokens at once; the end may lie in the middle of them."""
    index = RepeatDetector(CONFIG).push_all(output)

    assert watched(output, step_sizes, GUARD.watch([], None)) == (None if index is None else index + 1)


@given(tokens, steps, st.integers(0, 40))
def test_a_prefix_counts_as_generated(output: list[int], step_sizes: list[int], joint: int) -> None:
    """Cut anywhere before its end, an output ends at the same token."""
    index = RepeatDetector(CONFIG).push_all(output)
    joint = min(joint, len(output) if index is None else index)
    watch = GUARD.watch([9, 9, 9, 9, *output[:joint]], {"repeat_prefix_len": joint})

    assert watched(output[joint:], step_sizes, watch) == (None if index is None else index + 1 - joint)


def test_what_was_over_before_the_joint_ends_with_the_next_token() -> None:
    """An engine cannot end a sequence before it has sampled."""
    watch = GUARD.watch([7, 7, 7, 7, 7], {"repeat_prefix_len": 5})

    assert watch.hit([]) is None
    assert watch.hit([1]) == 1


def test_an_output_that_was_taken_back_begins_anew() -> None:
    """Resumable requests of vLLM begin each turn with an empty output."""
    watch = GUARD.watch([], None)
    assert watch.hit([5, 5, 5, 5]) == 4

    assert watch.hit([5]) is None
    assert watch.hit([5, 6, 7]) is None


@pytest.mark.parametrize(
    ("stated", "length"),
    [(3, 3), (0, 0), (-2, 0), (99, 10), ("3", 0), (2.5, 0), (float("inf"), 0), (None, 0), ([3], 0)],
)
def test_a_bad_prefix_length_never_reaches_the_scheduler(stated: object, length: int) -> None:
    """An exception there would end every request of the server."""
    assert prefix_length({"repeat_prefix_len": stated}, 10) == length


@pytest.mark.parametrize("arguments", [None, {}, [], "text"])
def test_requests_that_say_nothing_are_watched_from_their_first_token(arguments: object) -> None:
    watch = GUARD.watch([5, 5, 5, 5, 5], arguments)

    assert (watch.hit([5, 5, 5]), watch.hit([5, 5, 5, 5]), watch.is_probe) == (None, 4, False)


def test_object_keys_are_counted_once_the_tokenizer_is_known() -> None:
    config = RepeatTerminateConfig(enabled=True, min_new_tokens=1, max_object_keys=2)
    guard = Guard(config, config.digest())
    guard.object_key_ids = [8, 9]

    assert guard.watch([8, 9], None).hit([8, 9, 1, 8, 9, 2]) == 5


def test_the_answer_to_a_probe_is_read_as_it_is_written() -> None:
    assert probed_digest(probe_answer("ab12")) == "ab12"
    assert [probed_digest(other) for other in ("repeat_terminate", "repetition_detected", "x:y", 7, None)] == [None] * 5
