"""A position keeps the row of the request that first computed it, whatever becomes of turns, requests and weights."""

from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from harness.engines.scripted import scripted_experts, scripted_logprobs, scripted_masks
from harness.errors import ClientLeft
from harness.samples.delivery import cut_response, plan_delivery
from harness.samples.merge import build_samples
from harness.sessions.continuation import Broken, Endings, Output
from harness.sessions.ledger import DropReason
from harness.sessions.session import Session
from harness.sessions.session_config import MissingRowsPolicy, Recorded
from harness.sessions.turn_outcome import Admission, Reply, break_off_turn, end_turn
from harness.token_rows import RaggedRows, RecordedRows, RowState, SampleRows, TokenRows, TurnRows
from harness.turn_ends import TurnEnd
from harness.types import (
    FinishReason,
    GenerationRequest,
    GenerationResult,
    Message,
    Sample,
    SamplingWishes,
    TokenIds,
    VersionSpan,
    as_ids,
)
from tests.builders import EOS, admit, assistant, new_session, toy_tokenizer, user
from tests.session_servers.true_rows import ROUTER, masks_must_be_true, masks_of, must_be_true, rows_of
from tests.thoroughness import examples

ENDINGS = Endings(frozenset({EOS}), lambda ids: "".join(map(chr, ids)))


def answer(request: GenerationRequest, ids: list[int], versions: list[int], reason: FinishReason) -> GenerationResult:
    """What an engine says that sampled `ids`, each under its version, and returns the rows that it was asked for."""
    output, size = as_ids(ids), request.input_ids.size
    tokens = np.concatenate([request.input_ids, output])
    logprobs = [
        scripted_logprobs(output[at : at + 1], size + at, str(version))[0] for at, version in enumerate(versions)
    ]
    rows = None
    if request.rows_from is not None and ids:
        under = [versions[max(0, position + 1 - size)] for position in range(request.rows_from, tokens.size - 1)]
        rows = np.concatenate(
            [
                scripted_experts(ROUTER, tokens[position : position + 1], position, str(version))
                for position, version in enumerate(under, request.rows_from)
            ]
        )
    return GenerationResult(
        request_id=request.request_id,
        input_ids=request.input_ids,
        output_ids=output,
        logprobs=np.asarray(logprobs, np.float32),
        finish_reason=reason,
        version_spans=tuple(VersionSpan(str(version), at, at + 1) for at, version in enumerate(versions)),
        rows=None if rows is None else TokenRows(request.rows_from or 0, rows),
        masks=true_masks(output, int(size), versions) if request.params.sampling_mask else None,
    )


def true_masks(output: TokenIds, start: int, versions: list[int]) -> RaggedRows:
    """The candidates of each token under its version."""
    size = toy_tokenizer().vocab_size
    each = [
        scripted_masks(output[at : at + 1], start + at, str(version), size)[0] for at, version in enumerate(versions)
    ]
    return RaggedRows.of(start, each)


class RandomSession:
    """A session whose turns branch, break, continue, move to another server and meet new weights."""

    def __init__(self, random: Random, **config: Any) -> None:
        self.random = random
        self.session = new_session(record=tuple(Recorded), sampling=SamplingWishes(top_p=0.9), **config)
        self.histories: list[list[Message]] = [[]]
        self.version = 0
        self.has_lost_rows = False

    def live(self) -> None:
        """Take a few turns, with restarts in between."""
        for number in range(self.random.randint(1, 6)):
            history = self.random.choice(self.histories)  # the latest, an earlier one, or none: a root of its own
            messages = [*history, user(f"{number}" * self.random.randint(0, 3))]
            reply = self.take_turn(admit(self.session, messages))
            self.histories.append([*messages, reply])
            if not self.random.randrange(4):
                self.restart()

    def take_turn(self, admission: Admission) -> Message:
        """Ask for a turn until it is complete."""
        output = admission.output_so_far()
        while not output.is_complete:
            output = self.ask(admission, output)
            if not output.is_complete and not self.random.randrange(3):
                admission = self.come_again(admission, output)
                output = admission.output_so_far()
        said = assistant(f"reply {admission.index}")
        self.session.record(end_turn(admission, output, Reply(said, TurnEnd.MODEL), 1_002.0))
        return said

    def ask(self, admission: Admission, output: Output) -> Output:
        """Send a request: whole, aborted in the queue or in flight, or broken; weights change before and in it."""
        request = output.next_request(admission.prompt_ids, admission.params, request_id=f"{self.random.random()}")
        ids = [self.random.randint(3, 250) for _ in range(self.random.randint(0, 4))]
        versions = []
        for _ in range(len(ids) + 1):
            self.version += not self.random.randrange(6)
            versions.append(self.version)
        match self.random.choice(["whole", "whole", "aborted", "broken"]):
            case "whole":
                joined = output.join(answer(request, [*ids, EOS], versions, FinishReason.STOP))
            case "aborted":
                joined = output.join(answer(request, ids, versions[:-1], FinishReason.ABORT))
            case _:
                self.has_lost_rows |= bool(ids)
                partial = structs.replace(
                    answer(request, ids, versions[:-1], FinishReason.ABORT), rows=None, masks=None
                )
                joined = output.join_broken(partial, len(ids), len(ids), Broken("lost", DropReason.UNVERSIONED))
        return joined.end_as_whole(admission.params, ENDINGS)

    def come_again(self, admission: Admission, output: Output) -> Admission:
        """The client leaves and asks again, perhaps the next server."""
        self.session.record(break_off_turn(admission, output, ClientLeft("left"), 1_002.0))
        if self.random.randrange(2):
            self.restart()
        return self.session.take_up(admission.index, 1_003.0, "")

    def restart(self) -> None:
        """Another process reads the session from its rows."""
        again = Session(self.session.session_id, self.session.api_key, self.session.config, 1_000.0)
        for turn in self.session.turns:
            kept = RecordedRows.from_bytes(RecordedRows(turn.rows, turn.masks).to_bytes())
            again.restore(structs.replace(turn, rows=kept.experts, masks=kept.masks))
        self.session = again


@settings(max_examples=examples(300), deadline=None)
@given(st.randoms(use_true_random=False))
def test_every_row_of_every_sample_is_the_one_first_computed(random: Random) -> None:
    """Only broken requests lose rows, and the last token of a sample has none yet; all others have masks too (I12)."""
    played = RandomSession(random)
    played.live()
    for sample in played.session.samples():
        must_be_true(sample, {RowState.LOST} if played.has_lost_rows else set())
        masks_must_be_true(sample, {RowState.LOST} if played.has_lost_rows else set())


@settings(max_examples=examples(200), deadline=None)
@given(st.randoms(use_true_random=False))
def test_a_sample_that_requires_rows_ends_at_the_first_gap(random: Random) -> None:
    """In the middle of a turn too, and not before; its ledger has the rest."""
    played = RandomSession(random, missing_rows=MissingRowsPolicy.REQUIRE)
    played.live()
    samples, ledger = played.session.samples(), played.session.ledger()

    for sample in samples:
        must_be_true(sample)
        masks_must_be_true(sample)
    assert ledger.difference == 0
    assert ledger.trained == sum(int(sample.loss_mask.sum()) for sample in samples)
    found = [sample.tokens.tolist() for sample in samples]
    whole = [up_to_gap(sample) for sample in build_samples(plan_delivery(played.session.turns), {})]
    assert all(tokens in whole for tokens in found)
    assert all(any(other[: len(tokens)] == tokens for other in found) for tokens in whole if tokens)


def up_to_gap(sample: Sample) -> list[int]:
    """The tokens before the first missing row or mask, up to the last sampled one; none if the gap is before all."""
    start, rows, masks = sample.tokens.size - sample.response_length, rows_of(sample), masks_of(sample)
    size = next((at + 1 for at, state in enumerate(rows.states[:-1]) if state != RowState.PRESENT), sample.tokens.size)
    lost = np.flatnonzero((masks.states != RowState.PRESENT) & (sample.behavior_versions >= 0))
    size = min(size, start + int(lost[0]) if lost.size else size)
    sampled = np.flatnonzero(sample.behavior_versions[: max(0, size - start)] >= 0)
    return sample.tokens[: start + int(sampled[-1]) + 1].tolist() if sampled.size else []


def test_the_next_turn_brings_the_row_of_the_last_token() -> None:
    """No request has read that token before."""
    session = new_session(record=(Recorded.ROUTED_EXPERTS,))
    first = say(session, [user("a")])
    [sample] = session.samples()
    assert rows_of(sample).states[-1] == RowState.NOT_READ

    say(session, [user("a"), first, user("b")])

    [longer] = session.samples()
    assert rows_of(longer).states[sample.tokens.size - 1] == RowState.PRESENT
    must_be_true(longer)


def test_rows_that_an_engine_does_not_return_are_missing_by_name() -> None:
    """The turn counts all the same; a later prefill does not fill them in."""
    session = new_session(record=(Recorded.ROUTED_EXPERTS,))
    first = say(session, [user("a")], without_rows=True)
    size = session.turn(0).prompt_length + session.turn(0).output_ids.size

    say(session, [user("a"), first, user("b")])

    [sample] = session.samples()
    assert sample.metadata["missing_rows"] == {"not_returned": size - 1}
    must_be_true(sample, {RowState.NOT_RETURNED})


@pytest.mark.parametrize("missing", [0, 1])
def test_a_sample_that_requires_rows_ends_before_the_turn_that_lacks_some(missing: int) -> None:
    """The ledger names the reason for what it drops, behind the gap too."""
    session = new_session(record=(Recorded.ROUTED_EXPERTS,), missing_rows=MissingRowsPolicy.REQUIRE)
    history: list[Message] = []
    for number in range(3):
        history += [user(f"{number}")]
        history += [say(session, history, without_rows=number == missing)]

    samples, ledger = session.samples(), session.ledger()

    assert [sample.metadata["turns"] for sample in samples] == ([[0]] if missing else [])
    for sample in samples:
        must_be_true(sample)
    assert ledger.dropped == {"missing_rows": 3 * (3 - missing)}
    assert ledger.difference == 0


def test_a_cut_sample_keeps_the_rows_of_its_tokens() -> None:
    session = new_session(record=(Recorded.ROUTED_EXPERTS,))
    say(session, [user("a")])
    [sample] = session.samples()

    cut = cut_response(sample, 1)

    assert np.array_equal(rows_of(cut).values, rows_of(sample).values[: cut.tokens.size])
    assert len(rows_of(cut).states) == cut.tokens.size


def test_rows_of_another_model_are_missing_by_name() -> None:
    """A session may outlive the model that began it; the shape is that of the first row."""
    first, other = np.ones((2, 2, 2), np.uint8), np.ones((3, 4, 2), np.uint8)
    turns = [TurnRows(0, (TokenRows(0, first),)), TurnRows(2, (TokenRows(2, other),))]

    rows = SampleRows.of_turns(turns, 6)

    assert rows.values.shape == (6, 2, 2)
    assert rows.missing == {"other_shape": 3}


def test_a_session_that_records_nothing_asks_for_nothing() -> None:
    session = new_session()
    admission = admit(session, [user("a")])

    request = admission.output_so_far().next_request(admission.prompt_ids, admission.params, request_id="1")

    assert request.rows_from is None


def say(session: Session, messages: list[Message], *, without_rows: bool = False) -> Message:
    """Take one turn whose request returns rows, or none."""
    admission = admit(session, messages)
    output = admission.output_so_far()
    request = output.next_request(admission.prompt_ids, admission.params, request_id=f"{admission.index}")
    result = answer(request, [65, 66, EOS], [admission.index] * 3, FinishReason.STOP)
    said = assistant(f"reply {admission.index}")
    output = output.join(structs.replace(result, rows=None) if without_rows else result)
    session.record(end_turn(admission, output, Reply(said, TurnEnd.MODEL), 1_002.0))
    return said
