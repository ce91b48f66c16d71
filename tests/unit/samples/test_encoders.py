"""Encoders: what is sampled stays as it was sampled, whatever the answer looks like and wherever its tokens end."""

import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.object_list.encoder import ObjectListEncoder
from examples.object_list.object_list import ListEnd, find_missing, read_object_list
from harness.errors import SegmentError
from harness.samples.encoders import WholeSampleEncoder, require_sampled_prefix
from harness.samples.rollout import Outcome, OutcomeKind, Rollout
from harness.samples.segments import COLUMNS, Segment
from harness.token_rows import RowState, SampleRows
from harness.types import Json, Sample, as_ids, as_logprobs
from tests.builders import sample
from tests.unit.samples.merging_tokenizer import END, LABELS, TORN, byte_ids, bytes_of, merging_tokenizer, spell

PROMPT = [11, 12, 13]
ROLLOUT = Rollout(None, Outcome(OutcomeKind.FINISHED, None), (), {}, None, 0.0)
CAT: Json = {"bbox_2d": [1, 2, 11, 22], "label": "cat"}
DOG: Json = {"bbox_2d": [30, 4, 40, 24], "label": "dog"}
NEKO: Json = {"bbox_2d": [5, 60, 15, 80], "label": "猫"}
SHAPE: Json = {"poly": [1, 2, 3, 4, 5, 6], "label": "cat"}


def end_id() -> int:
    """The token that ends a turn."""
    [only] = merging_tokenizer().eos_ids
    return only


def answered(ids: list[int]) -> Sample:
    """A sample whose only turn sampled `ids`, each with a logprob of its own."""
    logprobs = as_logprobs(np.linspace(-0.1, -3.0, len(ids)))
    versions = as_ids(np.full(len(ids), 7))
    return sample(
        tokens=as_ids([*PROMPT, *ids]),
        response_length=len(ids),
        loss_mask=np.ones(len(ids), dtype=np.uint8),
        rollout_log_probs=logprobs,
        behavior_versions=versions,
        proximal_logprobs=logprobs,
        proximal_versions=versions,
    )


def encoder(*truths: Json) -> ObjectListEncoder:
    """Of samples with these true objects."""
    return ObjectListEncoder(merging_tokenizer(), lambda _rollout, _sample: truths, end_id())


def kept_of(segment: Segment) -> int:
    """How many tokens of the answer were sampled."""
    return int((segment.behavior_versions != -1).sum())


def text_of(segment: Segment) -> str:
    """The answer, end marker included."""
    return merging_tokenizer().decode(segment.ids[len(PROMPT) :].tolist())


@pytest.mark.parametrize(
    ("text", "truths", "becomes", "counts"),
    [
        pytest.param(spell(CAT) + END, [CAT], spell(CAT), (0, 0, 0, 0), id="nothing is missing"),
        pytest.param(spell(CAT) + END, [CAT, DOG], spell(CAT, DOG), (0, 0, 0, 1), id="one is missing"),
        pytest.param(spell() + END, [CAT, NEKO], spell(CAT, NEKO), (0, 0, 0, 2), id="an empty list"),
        pytest.param(spell() + END, [], spell(), (0, 0, 0, 0), id="rightly empty"),
        pytest.param("I see a cat." + END, [CAT], spell(CAT), (0, 1, 0, 1), id="garbage"),
        pytest.param("I see nothing." + END, [], spell(), (0, 1, 0, 0), id="garbage and no truth"),
        pytest.param(END, [CAT], spell(CAT), (1, 0, 0, 1), id="ended at once"),
        pytest.param(spell(CAT)[:-1], [CAT], spell(CAT), (1, 0, 0, 0), id="cut behind an object"),
        pytest.param(spell(CAT, DOG)[:-9], [CAT, DOG], spell(CAT, DOG), (1, 0, 0, 1), id="cut in a string"),
        pytest.param(spell(CAT)[:-1] + ",", [DOG], spell(CAT, DOG), (1, 0, 0, 1), id="cut behind a comma"),
        pytest.param(spell(CAT), [CAT], spell(CAT), (0, 0, 0, 0), id="cut behind the list"),
        pytest.param(spell(CAT, CAT) + END, [CAT], spell(CAT, CAT), (0, 0, 0, 0), id="said twice"),
        pytest.param(spell(CAT, CAT) + END, [CAT, CAT], spell(CAT, CAT), (0, 0, 0, 0), id="there twice"),
        pytest.param(spell(CAT)[:-1] + ",]" + END, [CAT], spell(CAT), (0, 1, 0, 0), id="comma too many"),
        pytest.param(spell(CAT, 3, DOG) + END, [DOG], spell(CAT, DOG), (0, 1, 0, 1), id="no object among them"),
        pytest.param(spell(CAT)[:-1] + ", {x: 1}]" + END, [CAT], spell(CAT), (0, 1, 0, 0), id="no JSON"),
        pytest.param('[{"n": NaN}]' + END, [], spell(), (0, 1, 0, 0), id="NaN is no JSON"),
        pytest.param(spell(CAT) + " That is all." + END, [CAT], spell(CAT), (0, 1, 0, 0), id="text behind the list"),
        pytest.param(spell(SHAPE, CAT) + END, [CAT, SHAPE], spell(SHAPE, CAT), (0, 0, 2, 0), id="polygons"),
        pytest.param(spell({"label": "cat"}) + END, [CAT], spell({"label": "cat"}, CAT), (0, 1, 0, 1), id="no box"),
    ],
)
def test_an_answer_becomes_a_whole_list(text: str, truths: list[Json], becomes: str, counts: tuple[int, ...]):
    """Its sound beginning, the boxes that it has missed, a bracket, the end of the turn; what was met is counted."""
    given_sample = answered(merging_tokenizer().encode(text))
    encoded = encoder(*truths).encode(ROLLOUT, given_sample)
    assert encoded.segment is not None
    assert text_of(encoded.segment) == becomes + END
    keys = ("parse_truncated", "parse_dropped_invalid", "drop_poly", "fn_count")
    assert tuple(encoded.counts[key] for key in keys) == counts
    require_sampled_prefix(encoded.segment, given_sample)


def test_an_answer_that_needs_nothing_is_the_sample_itself():
    """Token by token, the sampled end of the turn included."""
    given_sample = answered(merging_tokenizer().encode(spell(CAT, DOG) + END))
    encoded = encoder(CAT, DOG).encode(ROLLOUT, given_sample)
    assert encoded.segment is not None
    whole = Segment.of_sample(given_sample)
    assert all(getattr(encoded.segment, name).tobytes() == getattr(whole, name).tobytes() for name in COLUMNS)


def test_what_is_appended_is_trained_by_cross_entropy():
    """Mask 1, weight 1, version -1; the advantage of the sample goes to the sampled tokens only."""
    encoded = encoder(CAT, DOG).encode(ROLLOUT, answered(merging_tokenizer().encode(spell(CAT) + END)))
    assert encoded.segment is not None
    segment = encoded.segment.with_advantage(-0.5)
    is_appended = np.arange(len(segment)) >= len(PROMPT) + kept_of(segment)
    assert segment.loss_mask[is_appended].all()
    assert set(segment.advantages[is_appended].tolist()) == {1.0}
    assert set(segment.behavior_versions[is_appended].tolist()) == {-1}
    assert set(segment.advantages[len(PROMPT) : len(PROMPT) + kept_of(segment)].tolist()) == {-0.5}


def test_objects_that_are_no_boxes_stay_and_are_not_trained():
    """Every token that holds a part of one is context; the boxes around it are trained."""
    tokenizer = merging_tokenizer()
    before, middle, after = spell(CAT)[:-1] + ", ", json.dumps(SHAPE), ", " + spell(DOG)[1:]
    parts = [tokenizer.encode(part) for part in (before, middle, after)]
    encoded = encoder(CAT, DOG).encode(ROLLOUT, answered([*parts[0], *parts[1], *parts[2], end_id()]))
    assert encoded.segment is not None
    expected = [1] * len(parts[0]) + [0] * len(parts[1]) + [1] * (len(parts[2]) + 1)
    assert encoded.segment.loss_mask.tolist() == [0] * len(PROMPT) + expected


def test_an_object_that_ends_inside_a_token_is_kept_to_the_token_before():
    """The sampled `}]` cannot stay when the list continues: its brace is encoded with what is appended."""
    tokenizer = merging_tokenizer()
    body = spell(CAT)[:-2]
    [both] = [token for token in range(tokenizer.vocab_size) if tokenizer.token_text(token) in ('"}]', "}]")][:1]
    start = tokenizer.encode(body.removesuffix(tokenizer.token_text(both).removesuffix("}]")))
    encoded = encoder(CAT, DOG).encode(ROLLOUT, answered([*start, both, end_id()]))
    assert encoded.segment is not None
    assert kept_of(encoded.segment) == len(start)
    assert text_of(encoded.segment) == spell(CAT, DOG) + END


def test_a_character_that_would_be_torn_apart_is_encoded_again():
    """Of a character whose last byte is in the token that cannot stay, no byte is left behind."""
    tokenizer = merging_tokenizer()
    start = tokenizer.encode(spell(NEKO).removesuffix('猫"}]'))
    torn = tokenizer._raw.token_to_id("".join(TORN))
    ids = [*start, *(byte_ids()[byte] for byte in "猫".encode()[:2]), torn]
    assert tokenizer.decode(ids) == spell(NEKO)
    encoded = encoder(NEKO, DOG).encode(ROLLOUT, answered(ids))
    assert encoded.segment is not None
    assert kept_of(encoded.segment) == len(start)
    assert text_of(encoded.segment) == spell(NEKO, DOG) + END


def test_only_the_last_turn_is_the_answer():
    """Turns before it, and what tools said, stay as they are."""
    tokenizer = merging_tokenizer()
    first, tool, last = tokenizer.encode("[1" + END), [21, 22], tokenizer.encode(spell(CAT) + END)
    both = answered([*first, *tool, *last])
    where = slice(len(first), len(first) + len(tool))
    columns = {name: getattr(both, name).copy() for name in ("loss_mask", "rollout_log_probs", "behavior_versions")}
    columns["loss_mask"][where], columns["rollout_log_probs"][where], columns["behavior_versions"][where] = 0, 0.0, -1
    both = replace(
        both, **columns, proximal_logprobs=columns["rollout_log_probs"], proximal_versions=columns["behavior_versions"]
    )
    encoded = encoder(CAT, DOG).encode(ROLLOUT, both)
    assert encoded.segment is not None
    assert text_of(encoded.segment).endswith(spell(CAT, DOG) + END)
    assert encoded.segment.ids[: len(PROMPT + first + tool)].tolist() == [*PROMPT, *first, *tool]
    require_sampled_prefix(encoded.segment, both)


def test_samples_without_an_answer_are_dropped_with_a_reason():
    """One whose last turn has no output, and one of which no token may be trained."""
    empty = sample(
        loss_mask=np.asarray([1, 0], dtype=np.uint8),
        rollout_log_probs=as_logprobs([-0.1, 0.0]),
        proximal_logprobs=as_logprobs([-0.1, 0.0]),
        behavior_versions=as_ids([0, -1]),
        proximal_versions=as_ids([0, -1]),
    )
    assert encoder().encode(ROLLOUT, empty).reason == "no_answer"
    answer = answered(merging_tokenizer().encode(spell() + END))
    masked = replace(answer, loss_mask=np.zeros(answer.response_length, dtype=np.uint8))
    assert encoder().encode(ROLLOUT, masked).reason == "nothing_to_train"
    assert WholeSampleEncoder().encode(ROLLOUT, masked).reason == "nothing_to_train"
    assert WholeSampleEncoder().encode(ROLLOUT, empty).segment is not None


def test_a_truth_that_is_neither_box_nor_polygon_is_an_error():
    """It names the object: nothing is trained on what nobody meant."""
    given_sample = answered(merging_tokenizer().encode(spell() + END))
    for wrong in ({"label": "cat"}, {**CAT, "bbox_2d": [11, 2, 1, 22]}, {**CAT, "label": ""}, {**CAT, "bbox_2d": "x"}):
        with pytest.raises(SegmentError, match="true object 1 is no box"):
            encoder(DOG, wrong).encode(ROLLOUT, given_sample)


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ("ids", "ids at token 4 is"),
        ("behavior_logprobs", "behavior_logprobs at token 4 is"),
        ("behavior_versions", "behavior_versions at token 4 is"),
    ],
)
def test_an_encoder_that_changes_what_was_sampled_is_found_out(column: str, message: str):
    """Whichever encoder it is: its segment is held against the sample, id by id."""
    given_sample = answered(merging_tokenizer().encode(spell(CAT) + END))
    made = encoder(CAT, DOG).encode(ROLLOUT, given_sample).segment
    assert made is not None
    changed = getattr(made, column).copy()
    changed[4] += 1
    proximal = column.replace("behavior", "proximal")
    with pytest.raises(SegmentError, match=message):
        require_sampled_prefix(replace(made, **{column: changed, proximal: changed}), given_sample)


def test_an_encoder_keeps_the_experts_of_the_tokens_that_it_keeps():
    """Appended tokens have none; segments without them, or with others, are found out."""
    plain = answered(merging_tokenizer().encode(spell(CAT) + END))
    values = np.arange(plain.tokens.size * 4, dtype=np.uint8).reshape(-1, 2, 2)
    rows = SampleRows(values, np.full(plain.tokens.size, RowState.PRESENT, np.uint8))
    given_sample = replace(plain, routed_experts=rows)
    made = encoder(CAT, DOG).encode(ROLLOUT, given_sample).segment
    assert made is not None
    assert made.routed_experts is not None

    require_sampled_prefix(made, given_sample)
    assert len(made.routed_experts.states) < len(made)
    for wrong in (None, replace(rows, values=values + np.uint8(1)), rows.first(4)):
        with pytest.raises(SegmentError, match="routed experts"):
            require_sampled_prefix(replace(made, routed_experts=wrong), given_sample)


def test_an_encoder_that_trains_what_was_masked_or_adds_sampled_tokens_is_found_out():
    """A mask only ever falls, and behind an appended token none is sampled."""
    given_sample = answered(merging_tokenizer().encode(spell(CAT)))
    made = Segment.of_sample(given_sample)
    masked = replace(given_sample, loss_mask=np.zeros(given_sample.response_length, dtype=np.uint8))
    require_sampled_prefix(Segment.of_sample(masked), given_sample)
    with pytest.raises(SegmentError, match="loss_mask at token 3 is 0 in the sample and 1 in the segment"):
        require_sampled_prefix(made, masked)
    with pytest.raises(SegmentError, match="the segment has"):
        require_sampled_prefix(made, answered(given_sample.tokens[3:-1].tolist()))
    appended = {name: getattr(made, name).copy() for name in COLUMNS}
    appended["behavior_versions"][5] = appended["proximal_versions"][5] = -1
    with pytest.raises(SegmentError, match="token 6 counts as sampled, but follows an appended one"):
        require_sampled_prefix(Segment(**appended), given_sample)


BOXES = st.builds(
    lambda x, y, label: {"bbox_2d": [x, y, x + 10, y + 20], "label": label},
    st.integers(0, 3).map(lambda step: 40 * step),
    st.integers(0, 3).map(lambda step: 40 * step),
    st.sampled_from(LABELS),
)


@st.composite
def spelled(draw: st.DrawFn, text: str) -> list[int]:
    """Ids of `text` that no encoder would choose: some stretches merged, others byte by byte, through characters."""
    data = text.encode()
    borders = sorted({0, len(data), *draw(st.lists(st.integers(0, len(data)), max_size=6))})
    ids: list[int] = []
    for start, end in pairwise(borders):
        stretch = data[start:end]
        try:
            ids += merging_tokenizer().encode_plain(stretch.decode())
        except UnicodeDecodeError:
            ids += [byte_ids()[byte] for byte in stretch]
    return ids


@given(st.data(), st.lists(BOXES, max_size=4), st.lists(BOXES, max_size=4))
def test_whatever_is_cut_wherever_the_sampled_ids_stay(data: st.DataObject, said: list[Json], truths: list[Json]):
    """Any list, in any spelling, cut behind any token: the segment is its whole objects and what was missed.

    The sampled ids stay to the last token that the whole objects leave, and no token fewer.
    """
    text = spell(*said)
    ids = data.draw(spelled(text))
    ids = ids[: data.draw(st.integers(1, len(ids)))]
    given_sample = answered(ids)

    encoded = encoder(*truths).encode(ROLLOUT, given_sample)

    segment = encoded.segment
    assert segment is not None
    require_sampled_prefix(segment, given_sample)
    kept = kept_of(segment)
    assert segment.ids[: len(PROMPT) + kept].tolist() == [*PROMPT, *ids[:kept]]
    answer = text_of(segment)
    assert answer.endswith(END)
    there = sum(map(bytes_of, ids))
    whole = [box for at, box in enumerate(said) if len(spell(*said[: at + 1])[:-1].encode()) <= there]
    missing = find_missing(whole, truths, 0.5)
    assert json.loads(answer.removesuffix(END)) == [*whole, *missing]
    assert encoded.counts["fn_count"] == len(missing)
    assert encoded.counts["parse_truncated"] == (there < len(text.encode()))
    if kept < len(ids):
        sound = spell(*whole)[:-1].encode()
        next_end = sum(map(bytes_of, ids[: kept + 1]))
        assert next_end > len(sound) or is_inside_a_character(sound, next_end)


def is_inside_a_character(data: bytes, at: int) -> bool:
    """Whether a cut at `at` would tear a character apart."""
    return at < len(data) and data[at] & 0xC0 == 0x80


@given(st.lists(BOXES, max_size=3), st.integers(0, 200), st.text(max_size=5))
def test_a_list_is_read_as_far_as_json_goes(said: list[Json], at: int, noise: str):
    """With anything put in anywhere: all that was read is JSON, and a list that closes is what json.loads says."""
    text = spell(*said)
    text = text[:at] + noise + text[at:]
    read = read_object_list(text)
    try:
        parsed = json.loads(text)
    except ValueError:
        parsed = None
    is_list = isinstance(parsed, list) and all(isinstance(each, dict) for each in parsed)
    assert (read.end is ListEnd.CLOSED) == is_list
    if is_list:
        assert [each.value for each in read.objects] == parsed
    closed = text[: read.sound] + "]" if read.sound else "[]"
    assert json.loads(closed) == [each.value for each in read.objects]


@pytest.mark.parametrize("text", ['[{"a": ' + "[" * 100_000, '[{"a": ' + "[" * 100_000 + "]" * 100_000 + "}]"])
def test_deep_nesting_is_no_crash(text: str):
    """It is cut short, or no JSON that anybody reads."""
    assert read_object_list(text).end in {ListEnd.TRUNCATED, ListEnd.BROKEN}


def test_a_box_finds_the_truth_that_it_overlaps_most():
    """Of its label, from half an overlap on, and each truth once."""
    near, far = {**CAT, "bbox_2d": [2, 2, 12, 22]}, {**CAT, "bbox_2d": [4, 2, 14, 22]}
    assert find_missing([CAT], [far, near], 0.5) == [far]
    assert find_missing([CAT, CAT], [far, near], 0.5) == []
    assert find_missing([CAT], [{**near, "label": "dog"}], 0.5) == [{**near, "label": "dog"}]
    assert find_missing([CAT], [{**CAT, "bbox_2d": [8, 2, 18, 22]}], 0.5) == [{**CAT, "bbox_2d": [8, 2, 18, 22]}]
