"""Every sampled token keeps its candidates: ragged rows, cut, stored and passed on; other tokens have none."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.engines.scripted import scripted_masks
from harness.errors import MalformedRequest, RunError
from harness.samples.codec import sample_from_json, sample_to_json
from harness.samples.delivery import cut_response
from harness.sampling_masks import SampleMasks
from harness.sessions.admission import require_pinned
from harness.sessions.session import Session
from harness.sessions.session_config import MissingRowsPolicy, Recorded
from harness.sessions.turn_outcome import Reply, end_turn
from harness.token_rows import RaggedRows, RecordedRows, RowState, TurnRows
from harness.turn_ends import TurnEnd
from harness.types import FinishReason, GenerationResult, Message, Sample, SamplingWishes, VersionSpan, as_ids
from tests.builders import EOS, admit, assistant, new_session, toy_tokenizer, user
from tests.session_servers.true_rows import masks_must_be_true, masks_of

ROWS = st.lists(st.lists(st.integers(0, 70_000), max_size=5), max_size=8)


def masked_session(**config: Any) -> Session:
    return new_session(record=(Recorded.SAMPLING_MASK,), sampling=SamplingWishes(top_p=0.9), **config)


def say(session: Session, messages: list[Message], *, without_masks: bool = False) -> Message:
    """Take one turn of four tokens whose request returns masks, or none."""
    admission = admit(session, messages)
    output = admission.output_so_far()
    request = output.next_request(admission.prompt_ids, admission.params, request_id=f"{admission.index}")
    ids, size = as_ids([65, 66, 67, EOS]), request.input_ids.size
    masks = RaggedRows.of(int(size), scripted_masks(ids, int(size), "0", toy_tokenizer().vocab_size))
    result = GenerationResult(
        request.request_id,
        request.input_ids,
        ids,
        np.zeros(4, np.float32),
        FinishReason.STOP,
        (VersionSpan("0", 0, 4),),
        masks=masks if request.params.sampling_mask and not without_masks else None,
    )
    said = assistant(f"reply {admission.index}")
    session.record(end_turn(admission, output.join(result), Reply(said, TurnEnd.MODEL), 1_002.0))
    return said


def one_sample(turns: int = 2) -> Sample:
    session, history = masked_session(), list[Message]()
    for number in range(turns):
        history += [user(f"{number}")]
        history += [say(session, history)]
    [sample] = session.samples()
    return sample


def lists_of(rows: RaggedRows | SampleMasks) -> list[list[int]]:
    return [rows.values[start:end].tolist() for start, end in pairwise(rows.offsets)]


@given(ROWS, st.integers(0, 9), st.integers(0, 20))
def test_ragged_rows_are_the_lists_that_they_were_made_of(rows: list[list[int]], start: int, stop: int) -> None:
    """Cut, and read back from their bytes."""
    turn = TurnRows(start, (RaggedRows.of(start, rows),)).until(stop)

    again = RecordedRows.from_bytes(RecordedRows(None, turn).to_bytes())

    assert again.experts is None
    assert again.masks is not None
    kept = [part for part in again.masks.parts if isinstance(part, RaggedRows)]
    assert [each for part in kept for each in lists_of(part)] == rows[: max(0, stop - start)]
    assert again.masks.stop == turn.stop


@given(ROWS, st.data())
def test_the_masks_of_a_sample_are_those_of_its_turns(rows: list[list[int]], data: st.DataObject) -> None:
    """In any number of parts; the first tokens of a sample have the first masks."""
    cut = data.draw(st.integers(0, len(rows)))
    parts = (RaggedRows.of(2, rows[:cut]), RaggedRows.of(2 + cut, rows[cut:]))

    masks = SampleMasks.of_turns([TurnRows(2, parts)], 1, len(rows) + 3)

    assert lists_of(masks) == [[], *rows, []]
    assert masks.states.tolist() == [0, *[1] * len(rows), 0]
    assert lists_of(masks.part(0, cut + 1)) == [[], *rows[:cut]]


def test_sampled_tokens_have_candidates_and_others_none() -> None:
    """Across turns; the sample says that its logprobs are over them."""
    sample = one_sample()

    masks_must_be_true(sample)
    assert sample.metadata["filtered_turns"] == 2


def test_without_a_filter_every_id_is_a_candidate() -> None:
    """Nothing is asked for or kept."""
    session = new_session(record=(Recorded.SAMPLING_MASK,))
    say(session, [user("a")])

    [sample] = session.samples()

    assert sample.sampling_mask is None
    assert "filtered_turns" not in sample.metadata
    assert not session.has_rows(session.turn(0))


def test_a_session_that_records_no_masks_asks_for_none() -> None:
    session = new_session(sampling=SamplingWishes(top_p=0.9))

    assert not admit(session, [user("a")]).params.sampling_mask


@pytest.mark.parametrize("policy", MissingRowsPolicy)
def test_missing_masks_follow_the_policy_of_missing_rows(policy: MissingRowsPolicy) -> None:
    """Delivered by name, or dropped with what follows; the ledger adds up."""
    session = masked_session(missing_rows=policy)
    history: list[Message] = []
    for number in range(3):
        history += [user(f"{number}")]
        history += [say(session, history, without_masks=number == 1)]

    [sample] = session.samples()

    if policy is MissingRowsPolicy.MASK:
        masks_must_be_true(sample, {RowState.NOT_RETURNED})
        assert sample.metadata["missing_masks"] == {"not_returned": 4}
    else:
        masks_must_be_true(sample)
        assert sample.metadata["turns"] == [0]
        assert session.ledger().dropped == {"missing_rows": 8}
    assert session.ledger().difference == 0


def test_a_cut_sample_keeps_the_masks_of_its_tokens() -> None:
    cut = cut_response(one_sample(), 3)

    assert len(masks_of(cut).states) == 3
    masks_must_be_true(cut)


@pytest.mark.parametrize("change", [{"offsets": "AAAAAA=="}, {"states": "AQ=="}, {"values": "AAA="}, {"dtype": "<x9"}])
def test_masks_that_fit_nothing_are_refused_by_name(change: dict[str, str]) -> None:
    plain = sample_to_json(one_sample())

    with pytest.raises(RunError, match="sampling_mask"):
        sample_from_json({**plain, "sampling_mask": {**plain["sampling_mask"], **change}})


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ({"temperature": 0.5}, "temperature"),
        ({"top_p": 1.0}, "top_p"),
        ({"top_k": 20}, "top_k"),
        ({"min_p": 0.1}, "min_p"),
        ({"temperature": 1.0, "top_p": 0.9, "top_k": 0, "seed": 3}, None),
        ({}, None),
    ],
)
def test_a_request_may_not_change_the_distribution(asked: dict[str, Any], name: str | None) -> None:
    """The session's value, or the neutral one; equal values pass."""
    owned = SamplingWishes(top_p=0.9)
    if name is None:
        require_pinned(SamplingWishes(**asked), owned)
        return
    with pytest.raises(MalformedRequest, match=f"{name}: expected") as refused:
        require_pinned(SamplingWishes(**asked), owned)
    assert refused.value.param == name
