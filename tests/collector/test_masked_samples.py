"""Filtered tokens are trained where their masks were recorded, and have no ratio where one is missing."""

from typing import Any

import numpy as np
import pytest

from harness.errors import SegmentError, StepError
from harness.samples.encoders import require_sampled_prefix
from harness.samples.packs import Pack
from harness.samples.segments import Segment
from harness.sessions.session import Session
from harness.training.collector.sampling_scale import OffScale, stamp_scale
from harness.training.collector.segment_maker import SegmentMaker
from harness.types import Message, SamplingWishes
from tests.builders import new_session, user
from tests.collector.test_segment_maker import rollout_of
from tests.unit.sessions.test_sampling_masks import masked_session, one_sample, say


def talk(session: Session, *turns: Any) -> Session:
    """Turns with masks, or without where one is False."""
    history: list[Message] = []
    for number, has_masks in enumerate(turns):
        history += [user(f"{number}")]
        history += [say(session, history, without_masks=not has_masks)]
    return session


def test_filtered_tokens_are_on_the_scale_of_their_masks() -> None:
    """Without recorded masks the filter is refused, and the temperature always is."""
    masked = rollout_of(talk(masked_session(), True, True)).rollout
    assert stamp_scale(masked, OffScale.REFUSE) == masked

    bare = rollout_of(talk(new_session(sampling=SamplingWishes(top_p=0.9)), True)).rollout
    with pytest.raises(StepError, match=r"top_p is 0.9; .* record the `sampling_mask`"):
        stamp_scale(bare, OffScale.REFUSE)

    wishes = SamplingWishes(top_p=0.9, temperature=0.7)
    hot = rollout_of(talk(new_session(record=("sampling_mask",), sampling=wishes), True)).rollout
    with pytest.raises(StepError, match=r"temperature is 0\.7"):
        stamp_scale(hot, OffScale.REFUSE)


def test_tokens_without_their_mask_have_no_ratio() -> None:
    """They are counted as sampled, and trained by cross-entropy; the others keep their values."""
    scored = rollout_of(talk(masked_session(), True, False, True))

    [made] = SegmentMaker(1000).make(scored, 0.5, version=0)

    plain, missing = Segment.of_sample(scored.rollout.samples[0]), scored.rollout.session["turns"][1]
    is_missing = np.zeros(len(plain), dtype=bool)
    is_missing[missing["prompt_length"] : missing["prompt_length"] + missing["output_length"]] = True
    assert made.segment is not None
    assert {*made.segment.behavior_versions[is_missing].tolist()} == {-1}
    assert (made.segment.behavior_versions[~is_missing] == plain.behavior_versions[~is_missing]).all()
    assert (made.segment.loss_mask == plain.loss_mask).all()
    assert made.facts.trained == 12


def test_an_encoder_may_not_lose_masks() -> None:
    """Its segment would be trained over the whole vocabulary; tokens that it appends have none."""
    sample = one_sample()
    whole = Segment.of_sample(sample)
    columns = [whole.ids, whole.loss_mask, whole.advantages, whole.behavior_logprobs, whole.proximal_logprobs]
    versions = [whole.behavior_versions, whole.proximal_versions]
    longer = [np.append(each, 1) for each in columns] + [np.append(each, -1) for each in versions]
    longer[3][-1] = longer[4][-1] = 0

    with pytest.raises(SegmentError, match="sampling_mask"):
        require_sampled_prefix(Segment(*columns, *versions), sample)
    kept = Segment(*longer, whole.sampling_mask)
    require_sampled_prefix(kept, sample)
    [again] = Pack.of([kept], [0]).segments()
    require_sampled_prefix(again, sample)
    require_sampled_prefix(whole.first(len(whole) - 1), sample)
