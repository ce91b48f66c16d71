"""A turn made of several engine requests is the turn that one request would have made."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.sessions.continuation import Endings, Output, first_stop_string, segment_seed
from harness.sessions.ledger import DropReason
from harness.top_logprobs import TopLogprobs
from harness.types import (
    Discarded,
    FinishReason,
    GenerationResult,
    PromptLogprobs,
    SamplingParams,
    VersionSpan,
    as_ids,
    as_logprobs,
)
from tests.builders import EOS, toy_tokenizer
from tests.unit.tokens.test_incremental import FALLBACK

PROMPT = as_ids([1, 2])
PARAMS = SamplingParams(max_new_tokens=100, seed=5)
ENDINGS = Endings(frozenset({EOS}), toy_tokenizer().decode)


def result(number: int, ids: list[int], finish: FinishReason, *, version: str = "0", **fields) -> GenerationResult:
    """What request `number` answered."""
    spans = (VersionSpan(version, 0, len(ids)),) if ids else ()
    logprobs = as_logprobs([-number - position / 1000 for position in range(len(ids))])
    return GenerationResult(f"{number:032x}", as_ids([1]), as_ids(ids), logprobs, finish, spans, **fields)


def text(words: str) -> list[int]:
    return toy_tokenizer().encode_plain(words)


def output_of(*results: GenerationResult, params: SamplingParams = PARAMS) -> Output:
    output = Output.nothing()
    for each in results:
        output = output.join(each).end_as_whole(params, ENDINGS)
    return output


def next_params(output: Output, params: SamplingParams) -> SamplingParams:
    return output.next_request(PROMPT, params, request_id="next").params


@given(
    lengths=st.lists(st.integers(0, 5), min_size=1, max_size=6),
    versions=st.lists(st.sampled_from(["0", "1", "2"]), min_size=6, max_size=6),
)
def test_joined_segments_cover_the_output_without_gap(lengths, versions):
    """Ids and logprobs in order; spans and segments tile the output; equal neighbors are one span."""
    parts = [
        result(number, list(range(10, 10 + length)), FinishReason.ABORT, version=versions[number])
        for number, length in enumerate(lengths)
    ]

    output = Output.nothing()
    for part in parts:
        output = output.join(part)

    assert output.ids.tolist() == [token_id for part in parts for token_id in part.output_ids]
    assert np.array_equal(output.logprobs, np.concatenate([part.logprobs for part in parts]))
    assert [position for span in output.version_spans for position in range(span.start, span.end)] == list(
        range(output.ids.size)
    )
    assert all(a.version != b.version for a, b in zip(output.version_spans, output.version_spans[1:], strict=False))
    assert [(each.start, each.end) for each in output.segments] == [
        (sum(lengths[:n]), sum(lengths[: n + 1])) for n in range(len(lengths))
    ]


def test_the_next_request_gets_what_is_left_of_the_budget_and_a_seed_of_its_own():
    """Nothing that was sampled is paid twice; the engine learns how much of its input is output."""
    output = output_of(result(0, [10, 11, 12], FinishReason.ABORT))

    request = output.next_request(PROMPT, PARAMS, request_id="next")

    assert (request.params.max_new_tokens, request.continues) == (97, 3)
    assert request.input_ids.tolist() == [*PROMPT.tolist(), 10, 11, 12]
    assert request.params.seed == segment_seed(5, 3) != 5
    first = Output.nothing().next_request(PROMPT, PARAMS, request_id="first")
    assert (first.input_ids, first.params, first.continues) == (PROMPT, PARAMS, 0)


@pytest.mark.parametrize(("asked", "left"), [(0, 0), (2, 0), (3, 0), (10, 7)])
def test_the_next_request_may_end_when_the_turn_as_a_whole_is_long_enough(asked, left):
    """An engine counts the tokens of its own request only."""
    output = output_of(result(0, [10, 11, 12], FinishReason.ABORT))

    assert next_params(output, replace(PARAMS, min_new_tokens=asked)).min_new_tokens == left


def test_a_turn_that_follows_a_grammar_begins_again():
    """Nothing of it is in the next request; what was sampled is in the ledger, what was scored stays."""
    params = replace(PARAMS, json_schema="{}")
    scored = PromptLogprobs(1, as_logprobs([-1.0]), "0")
    output = output_of(result(0, [10, 11, 12], FinishReason.ABORT, prompt_logprobs=scored), params=params)
    assert output.ids.size == 3, "a turn that is not gone on with keeps its partial output"

    again = output.keep_or_restart(params)

    assert (again.ids.size, again.segments, again.version_spans, again.finish) == (0, (), (), None)
    assert again.discarded == (Discarded(f"{0:032x}", 3, DropReason.RESTARTED),)
    assert again.scorings == (scored,)
    assert next_params(again, params) == params
    assert again.keep_or_restart(params).discarded == again.discarded
    assert output.keep_or_restart(PARAMS) is output


def test_a_request_that_produced_nothing_is_repeated_with_the_same_seed():
    """The same seed at the same position samples the same (I10)."""
    output = output_of(result(0, [], FinishReason.ABORT))

    assert next_params(output, PARAMS) == PARAMS
    assert segment_seed(5, 0) == 5


@pytest.mark.parametrize(
    ("partial", "params", "finish", "matched"),
    [
        ([10, EOS], PARAMS, FinishReason.STOP, EOS),
        ([10, EOS], replace(PARAMS, ignore_eos=True), FinishReason.ABORT, None),
        ([10, 77], replace(PARAMS, stop_token_ids=(77,)), FinishReason.STOP, 77),
        ([10, 11], replace(PARAMS, max_new_tokens=2), FinishReason.LENGTH, None),
        (text("a STOP"), replace(PARAMS, stop=("STOP",)), FinishReason.STOP, "STOP"),
        ([10, 11], PARAMS, FinishReason.ABORT, None),
        ([], PARAMS, FinishReason.ABORT, None),
    ],
)
def test_a_partial_that_has_ended_by_itself_is_not_continued(partial, params, finish, matched):
    """An abort and the end may meet in one step of the engine: the end counts."""
    output = output_of(result(0, partial, FinishReason.ABORT), params=params)

    assert (output.finish, output.matched_stop) == (finish, matched)
    assert output.is_complete is (finish is not FinishReason.ABORT)


def test_a_stop_string_across_the_joint_ends_the_turn_there():
    """No engine can see it: one half is in its input. What came behind it is discarded, and counted."""
    params = replace(PARAMS, stop=("STOP",))
    first, second = text("go ST"), text("OP and more")
    output = output_of(
        result(0, first, FinishReason.ABORT), result(1, second, FinishReason.LENGTH, version="1"), params=params
    )

    assert toy_tokenizer().decode(output.ids.tolist()) == "go STOP"
    assert (output.finish, output.matched_stop) == (FinishReason.STOP, "STOP")
    assert output.discarded == (Discarded(f"{1:032x}", len(text(" and more")), DropReason.AFTER_STOP),)
    assert output.version_spans == (VersionSpan("0", 0, 5), VersionSpan("1", 5, 7))
    assert (output.logprobs.size, output.segments[-1].end) == (7, 7)


def test_a_stop_string_that_the_engine_let_pass_does_not_end_the_turn_at_a_joint():
    """Among the first `min_tokens` vLLM looks for none: a turn that a pause cuts ends where it ends without one."""
    params = replace(PARAMS, stop=("STOP", "P"), min_new_tokens=6)
    parts = result(0, text("a STOP b"), FinishReason.ABORT), result(1, text("c STOP d"), FinishReason.LENGTH)

    for endings, said in [(ENDINGS, "a STOP"), (ENDINGS._replace(may_stop_early=False), "a STOP bc STOP")]:
        output = Output.nothing()
        for part in parts[: 1 if endings is ENDINGS else 2]:
            output = output.join(part).end_as_whole(params, endings)
        assert toy_tokenizer().decode(output.ids.tolist()) == said


def test_one_request_is_taken_at_its_word():
    """Without a joint the engine's own verdict stands, whatever the text says."""
    params = replace(PARAMS, stop=("STOP",))

    output = output_of(result(0, text("a STOP b"), FinishReason.LENGTH), params=params)

    assert (output.finish, output.ids.size) == (FinishReason.LENGTH, len(text("a STOP b")))


def test_alternatives_of_both_requests_are_kept_together():
    alternatives = TopLogprobs(np.zeros((2, 1), dtype=np.int32), np.zeros((2, 1), dtype=np.float32))
    output = output_of(
        result(0, [10, 11], FinishReason.ABORT, top_logprobs=alternatives),
        result(1, [12, 13], FinishReason.STOP, top_logprobs=alternatives),
    )

    assert output.top_logprobs is not None
    assert output.top_logprobs.ids.shape == (4, 1)


@given(st.text(alphabet="abé", max_size=12), st.lists(st.integers(0, 14), max_size=4))
def test_a_stop_string_is_found_wherever_the_joints_are(words, cuts):
    """The same token ends the turn as in one request; characters may be cut as well."""
    ids = text(words)
    stop = ("aba", "bé", "éb")
    whole = first_stop_string(as_ids(ids), stop, toy_tokenizer().decode)
    params = replace(PARAMS, stop=stop)

    output = Output.nothing()
    for number, (start, end) in enumerate(pairwise([0, *sorted(cuts), len(ids)])):
        if not output.is_complete:
            part = result(number, ids[start:end], FinishReason.ABORT)
            output = output.join(part).end_as_whole(params, ENDINGS)

    assert output.ids.size == (len(ids) if whole is None else whole.end)


@pytest.mark.parametrize("rest", [[], [0xFF], [ord("x")]])
@pytest.mark.parametrize("searched", [0, 300])
def test_a_stop_string_of_bytes_is_found_however_long_their_run_is(searched: int, rest: list[int]):
    """A search that begins inside a run would read all of it as no text."""
    ids = [*"日本".encode() * 50, *"🛑".encode(), *rest]

    found = first_stop_string(
        as_ids(ids), ["🛑"], FALLBACK.decode, searched=min(searched, len(ids) - 1), byte_ids=FALLBACK.byte_ids
    )

    assert found is not None
    assert found.end == 304


def test_a_turn_that_is_cut_often_is_searched_once():
    """Every token is read for a stop string when it comes, not again with each interruption."""
    read: list[int] = []

    def decode(ids: Sequence[int]) -> str:
        read.append(len(ids))
        return toy_tokenizer().decode(ids)

    endings = Endings(ENDINGS.eos_ids, decode)
    params = replace(PARAMS, stop=("never said",), max_new_tokens=100_000)
    output = Output.nothing()
    for number in range(20):
        output = output.join(result(number, text("word " * 100), FinishReason.ABORT)).end_as_whole(params, endings)

    assert output.ids.size == 10_000
    assert sum(read) < 2 * output.ids.size
