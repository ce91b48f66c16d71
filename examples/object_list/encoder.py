"""Encoder for answers that are a JSON list of objects, such as boxes: append what the model missed, and train it.

In a scenario, `train.encoder` names a function of yours that makes one, with the truth of your task.

The answer, which is the output of a sample's last turn, is read as far as it is right. Sampled ids stay, up to the last
whole object; from there on the true boxes that were missed are written, the list is closed and the turn ends. Only that
is encoded. A token that also holds text from behind the last whole object cannot stay; the characters of that object
that it held are encoded with what is appended, and so is a character whose bytes would be torn apart.

Appended tokens have loss mask 1, advantage 1 and behavior version -1: cross-entropy trains them. Tokens of objects that
are no boxes stay, as context: their mask becomes 0.
"""

import json
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from examples.object_list.object_list import ListEnd, ObjectList, find_missing, is_box, is_polygon, read_object_list
from harness import Rollout, Sample
from harness.errors import SegmentError
from harness.samples.versions import NOT_SAMPLED
from harness.training import EncodedSample, Segment
from harness.types import Json


class TextTokenizer(Protocol):
    """What the encoder needs of a tokenizer; that of `open_chat_tokenizer(...).tokenizer` has it."""

    @property
    def eos_ids(self) -> frozenset[int]:
        """Ids that end a turn."""
        ...

    def encode_plain(self, text: str) -> list[int]:
        """Ids of `text`."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD."""
        ...


@dataclass(frozen=True, slots=True)
class ObjectListEncoder:
    """Appends the boxes that an answer has missed.

    Counts of each sample: `parse_truncated`, 1 when the answer ended inside its list; `parse_dropped_invalid`, objects
    that are neither box nor polygon, and 1 for a rest that is no JSON list; `drop_poly`, polygons in the answer and
    among the truths, because only boxes are trained; `fn_count`, boxes that were appended.
    """

    tokenizer: TextTokenizer
    truth: Callable[[Rollout, Sample], Sequence[Json]]
    """The true objects of a sample, as the model is to write them."""
    end_id: int
    """Ends an answer to which something was appended."""
    least_iou: float = 0.5
    """Overlap (intersection over union) from which on a box of the same label is the true one."""

    def encode(self, rollout: Rollout, sample: Sample) -> EncodedSample:
        """The segment of `sample`; dropped as `no_answer` when it does not end with sampled tokens.

        Raises `SegmentError` when a true object is neither box nor polygon, or when the tokenizer does not give back
        what it is given.
        """
        whole = Segment.of_sample(sample)
        start = _start_of_answer(whole)
        answer: list[int] = whole.ids[start:].tolist()
        if not answer:
            return EncodedSample(None, "no_answer")
        is_ended = answer[-1] in self.tokenizer.eos_ids
        body = answer[:-1] if is_ended else answer
        text = self.tokenizer.decode(body)
        read = read_object_list(text)
        truths = self.truth(rollout, sample)
        _check_truths(truths)
        boxes = [each.value for each in read.objects if is_box(each.value) and not is_polygon(each.value)]
        missing = find_missing(boxes, [each for each in truths if not is_polygon(each)], self.least_iou)
        counts = _count(read, truths, len(boxes), len(missing))

        if read.end is ListEnd.CLOSED and not missing:
            kept, appended = len(answer), [] if is_ended else [self.end_id]
        else:
            wanted = text[: read.sound] + _rest_of_list(read, missing)
            kept = self._count_kept(body, wanted, read.sound)
            appended = [*self.tokenizer.encode_plain(wanted[len(self.tokenizer.decode(body[:kept])) :]), self.end_id]
            if self.tokenizer.decode([*body[:kept], *appended[:-1]]) != wanted:
                raise SegmentError(f"the tokenizer does not give back {wanted[-200:]!r} behind the ids of the answer")
        mask = whole.loss_mask.copy()
        for each in read.objects:
            if is_polygon(each.value) or not is_box(each.value):
                first, last = (self._count_tokens(body, chars) for chars in (each.start + 1, each.end))
                mask[start + first - 1 : start + last] = 0
        segment = _append(replace(whole, loss_mask=mask), start + kept, appended)
        if not segment.trained_tokens:
            return EncodedSample(None, "nothing_to_train", counts)
        return EncodedSample(segment, counts=counts)

    def _count_tokens(self, ids: list[int], chars: int) -> int:
        """How many of `ids` it takes to have `chars` characters."""
        return bisect_left(range(len(ids)), chars, key=lambda count: len(self.tokenizer.decode(ids[:count])))

    def _count_kept(self, ids: list[int], wanted: str, chars: int) -> int:
        """The most of `ids` that say nothing but the first `chars` characters of `wanted`, or fewer."""
        count = self._count_tokens(ids, chars)
        while count and not wanted[:chars].startswith(self.tokenizer.decode(ids[:count])):
            count -= 1
        return count


def _start_of_answer(whole: Segment) -> int:
    """Where the tokens begin that were sampled last."""
    context = np.flatnonzero(whole.behavior_versions == NOT_SAMPLED)
    return int(context[-1]) + 1 if context.size else 0


def _check_truths(truths: Sequence[Json]) -> None:
    for number, each in enumerate(truths):
        if not is_polygon(each) and not is_box(each):
            raise SegmentError(f"true object {number} is no box (bbox_2d, label) and no polygon (poly): {each!r}"[:500])


def _count(read: ObjectList, truths: Sequence[Json], boxes: int, missing: int) -> dict[str, int]:
    polygons = sum(is_polygon(each.value) for each in read.objects)
    return {
        "parse_truncated": int(read.end is ListEnd.TRUNCATED),
        "parse_dropped_invalid": len(read.objects) - polygons - boxes + (read.end is ListEnd.BROKEN),
        "drop_poly": polygons + sum(map(is_polygon, truths)),
        "fn_count": missing,
    }


def _rest_of_list(read: ObjectList, missing: Sequence[Json]) -> str:
    opening = "" if read.sound else "["
    comma = ", " if read.objects and missing else ""
    return opening + comma + ", ".join(json.dumps(each, ensure_ascii=False) for each in missing) + "]"


def _append(whole: Segment, kept: int, ids: Sequence[int]) -> Segment:
    """The first `kept` tokens of `whole`, then `ids`, which nobody sampled and which are trained."""
    added = len(ids)
    unsampled = np.full(added, NOT_SAMPLED)
    return Segment(
        ids=np.append(whole.ids[:kept], np.asarray(ids, dtype=np.int32)),
        loss_mask=np.append(whole.loss_mask[:kept], np.ones(added, dtype=np.uint8)),
        advantages=np.append(whole.advantages[:kept], np.ones(added, dtype=np.float32)),
        behavior_logprobs=np.append(whole.behavior_logprobs[:kept], np.zeros(added, dtype=np.float32)),
        proximal_logprobs=np.append(whole.proximal_logprobs[:kept], np.zeros(added, dtype=np.float32)),
        behavior_versions=np.append(whole.behavior_versions[:kept], unsampled),
        proximal_versions=np.append(whole.proximal_versions[:kept], unsampled),
        sampling_mask=whole.first(kept).sampling_mask,
        routed_experts=whole.first(kept).routed_experts,
    )
