"""What becomes of the samples of a rollout: segments that may be trained, and an account of every token."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import StepError
from harness.samples.delivery import plan_delivery
from harness.samples.encoders import EncodedSample, require_sampled_prefix
from harness.samples.merge import build_samples
from harness.samples.rollout import Outcome, OutcomeKind, Rollout
from harness.samples.segments import Segment, TooLong
from harness.sessions.record import RecordIds, session_record
from harness.sessions.session import Session
from harness.top_logprobs import TopLogprobs
from harness.training.collector.groups import GroupIndex, RolloutIndex, ScoredRollout, standardize, take_rewards
from harness.training.collector.sampling_scale import OffScale, require_on_scale, stamp_scale
from harness.training.collector.segment_maker import SegmentMaker
from harness.types import Json, Sample, SamplingWishes
from tests.builders import admit, assistant, finish, new_session, take_turn, user

INDEX = RolloutIndex(GroupIndex(0, 0), 0)


def rollout_of(session: Session) -> ScoredRollout:
    """The session as its manager hands it over."""
    record = session_record(session, RecordIds.NONE)
    samples = tuple(build_samples(plan_delivery(session.turns), {}))
    return ScoredRollout(INDEX, Rollout("s", Outcome(OutcomeKind.FINISHED, None), samples, record, None, 1.0), 1.0)


def ask(session: Session, messages: list[Any], text: str, **wishes: Any) -> list[Any]:
    """A turn under the sampling parameters `wishes`; the conversation afterwards."""
    finish(session, admit(session, messages, asked=SamplingWishes(**wishes)), text)
    return [*messages, assistant(text), user("more")]


def two_branches() -> Session:
    """Three turns: one, and two that continue from it."""
    session = new_session()
    first = [user("go")]
    take_turn(session, first, "one")
    for question in ("and?", "or?"):
        take_turn(session, [*first, assistant("one"), user(question)], f"answer to {question}")
    return session


@given(st.integers(8, 120), st.sampled_from([*TooLong]))
def test_every_token_of_a_session_is_accounted_for_once(length: int, too_long: TooLong):
    """Also of turns that several samples share, and whatever does not fit into a pack."""
    session = two_branches()
    ledger = session.ledger()
    maker = SegmentMaker(length, too_long=too_long)
    scored = rollout_of(session)
    if too_long is TooLong.ERROR and max(sample.tokens.size for sample in scored.rollout.samples) > length:
        with pytest.raises(StepError, match=f"packing_length, which is {length}"):
            list(maker.make(scored, 0.5, version=0))
        return
    made = list(maker.make(scored, 0.5, version=0))
    facts = [each.facts for each in made]
    assert sum(each.trained + each.masked + sum(each.dropped.values()) for each in facts) == ledger.generated
    assert sum(each.trained for each in facts) == sum(each.segment.trained_tokens for each in made if each.segment)
    assert [each.reason for each in facts] == ["" if each.segment else "too_long" for each in made]
    assert all(len(each.segment) == each.facts.tokens <= length for each in made if each.segment)


def test_an_encoder_that_cuts_and_appends_is_accounted_for():
    """What it leaves out is dropped under its own reason; what it appends was sampled by nobody."""

    class Cut:
        """Keeps all but the last two tokens, and appends one."""

        def encode(self, rollout: Rollout, sample: Sample) -> EncodedSample:
            """As said."""
            whole = Segment.of_sample(sample).first(sample.tokens.size - 2)
            zeros = np.append(whole.behavior_logprobs, np.float32(0))
            versions = np.append(whole.behavior_versions, np.int32(-1))
            segment = Segment(
                np.append(whole.ids, np.int32(9)), np.append(whole.loss_mask, np.uint8(1)),
                np.append(whole.advantages, np.float32(1)), zeros, zeros, versions, versions,
            )  # fmt: skip
            require_sampled_prefix(segment, sample)
            return EncodedSample(segment, counts={"fn_count": 1})

    session = new_session()
    turn = take_turn(session, [user("go")], "one two three")
    [made] = SegmentMaker(1000, Cut()).make(rollout_of(session), -2.0, version=0)
    sampled = turn.output_ids.size
    assert (made.facts.trained, made.facts.appended, dict(made.facts.dropped)) == (
        sampled - 2,
        1,
        {"cut_by_encoder": 2},
    )
    assert made.counts == {"fn_count": 1}
    assert made.segment is not None
    assert made.segment.advantages[-3:].tolist() == [-2.0, -2.0, 1.0]


def test_turns_that_forbid_tokens_lose_their_behavior_values():
    """They are trained by cross-entropy with the advantage as the weight, and counted as what they are: sampled."""
    session = new_session()
    messages = ask(session, [user("go")], "free")
    messages = ask(session, messages, "forced to be long", min_new_tokens=3)
    ask(session, messages, "free again")
    scored = rollout_of(session)
    [made] = SegmentMaker(1000).make(scored, 0.5, version=0)
    [plain] = [Segment.of_sample(sample) for sample in scored.rollout.samples]
    forced = scored.rollout.session["turns"][1]
    assert made.segment is not None
    is_forced = np.zeros(len(plain), dtype=bool)
    is_forced[forced["prompt_length"] : forced["prompt_length"] + forced["output_length"]] = True
    assert (made.segment.loss_mask == plain.loss_mask).all()
    assert (made.segment.advantages == 0.5 * plain.loss_mask).all()
    assert set(made.segment.behavior_versions[is_forced].tolist()) == {-1}
    assert not made.segment.behavior_logprobs[is_forced].any()
    assert (made.segment.behavior_logprobs[~is_forced] == plain.behavior_logprobs[~is_forced]).all()
    assert (made.segment.behavior_versions[~is_forced] == plain.behavior_versions[~is_forced]).all()
    assert made.facts.trained == session.ledger().trained
    assert made.facts.appended == 0


@pytest.mark.parametrize(
    ("wishes", "found"),
    [
        ({"temperature": 0.7}, {"temperature": 0.7}),
        ({"top_p": 0.9, "top_k": 5}, {"top_p": 0.9, "top_k": 5}),
        ({"min_p": 0.1}, {"min_p": 0.1}),
        ({"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}, {}),
    ],
)
def test_sampling_off_the_scale_is_refused_or_stamped(wishes: Json, found: Json):
    """By the name of session, turn and parameter."""
    session = new_session()
    ask(session, ask(session, [user("go")], "first"), "second", **wishes)
    rollout = rollout_of(session).rollout
    stamped = stamp_scale(rollout, OffScale.ALLOW)
    assert [sample.metadata.get("off_scale", {}) for sample in stamped.samples] == [found]
    if found:
        name, value = next(iter(found.items()))
        with pytest.raises(StepError, match=f"session s, turn 1: {name} is {value}; behavior logprobs are raw"):
            stamp_scale(rollout, OffScale.REFUSE)
        with pytest.raises(StepError, match=f"scenario.toml: {name} is {value}"):
            require_on_scale(wishes, OffScale.REFUSE, where="scenario.toml")
        require_on_scale(wishes, OffScale.ALLOW, where="scenario.toml")
    else:
        assert stamp_scale(rollout, OffScale.REFUSE) == stamped


def test_advantages_of_a_group():
    """Distances from its mean; equal rewards have none."""
    assert standardize([0.0, 1.0]) == pytest.approx([-1.0, 1.0], abs=1e-3)
    assert standardize([0.5, 0.5, 0.5]) == [0.0, 0.0, 0.0]
    assert standardize([3.0]) == [0.0]
    assert take_rewards((0.25, 1.0)) == [0.25, 1.0]


def test_bounds_that_make_no_sense_are_refused():
    """When the maker is made."""
    for wrong in ({"packing_length": 0}, {"packing_length": 8, "max_staleness": -1}):
        with pytest.raises(StepError, match="expected packing_length >= 1 and max_staleness >= 0"):
            SegmentMaker(**wrong)


def test_a_teachers_gap_is_added_to_the_advantage():
    """Weight times (teacher's minus behavior logprob), where there is a score; a sample without it is refused."""
    scored = rollout_of(two_branches())
    samples = [
        replace(each, teachers={"big": np.where(np.arange(each.response_length) % 3, -0.25, np.nan).astype(np.float32)})
        for each in scored.rollout.samples
    ]
    taught = replace(scored, rollout=replace(scored.rollout, samples=tuple(samples)))
    plain = list(SegmentMaker(200).make(scored, 0.5, version=0))
    made = list(SegmentMaker(200, teachers={"big": 2.0}).make(taught, 0.5, version=0))
    for before, after, sample in zip(plain, made, samples, strict=True):
        assert before.segment is not None
        assert after.segment is not None
        more = (
            np.nan_to_num(2.0 * (sample.teachers["big"] - sample.rollout_log_probs))
            * after.segment.loss_mask[-sample.response_length :]
        )
        assert np.allclose(
            after.segment.advantages[-sample.response_length :],
            before.segment.advantages[-sample.response_length :] + more,
        )
        gap, tokens = after.facts.teacher_gaps["big"]
        is_scored = (sample.loss_mask == 1) & ~np.isnan(sample.teachers["big"])
        assert 0 < tokens <= is_scored.sum()
        assert gap / tokens == pytest.approx(0.25 + sample.rollout_log_probs[is_scored].mean(), abs=0.2)
    with pytest.raises(StepError, match="teacher big: expected its logprobs in each sample"):
        list(SegmentMaker(200, teachers={"big": 1.0}).make(scored, 0.5, version=0))


def test_most_likely_tokens_of_a_teacher_go_to_the_learner():
    """At their tokens, cut with the segment, and in the place of the advantage; those of other teachers do not."""
    scored = rollout_of(two_branches())

    def taught(sample):
        ids = np.arange(2 * sample.response_length, dtype=np.int32).reshape(-1, 2)
        tops = {name: TopLogprobs(ids, -ids.astype(np.float32)) for name in ("big", "small")}
        return replace(sample, teachers={"big": sample.rollout_log_probs - 1}, teacher_tops=tops)

    samples = tuple(map(taught, scored.rollout.samples))
    rollout = replace(scored, rollout=replace(scored.rollout, samples=samples))
    shortest = min(each.tokens.size for each in samples)
    for length in (200, shortest - 1):
        for made in SegmentMaker(length, teachers={"big": 2.0}, too_long=TooLong.CUT).make(rollout, 0.5, version=0):
            if made.segment is not None:
                sample, size = samples[made.facts.sample], len(made.segment)
                prompt = sample.tokens.size - sample.response_length
                [top] = made.segment.teacher_tops.values()
                assert (top.ids[:prompt] == -1).all()
                assert np.array_equal(top.ids[prompt:], sample.teacher_tops["big"].ids[: size - prompt])
                assert set(made.segment.advantages.tolist()) <= {0.0, 0.5}
