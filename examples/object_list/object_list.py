"""Answers that are a JSON list of objects, read strictly, and boxes in them matched with the true ones.

Such an answer is often cut short, or goes wrong somewhere. What counts is how far it is right: `read_object_list` says
where the last whole object ends and why the list did not continue. Text is never repaired.

An object is a box (`bbox_2d`: x1, y1, x2, y2, and a `label`), a polygon (`poly`), or invalid. Only boxes are matched.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from harness.types import Json, refuse_constant

_SPACE = " \t\n\r"


class ListEnd(StrEnum):
    """Why the reading of a list ended."""

    CLOSED = "closed"
    """Its bracket closed it, and only space came after that."""
    TRUNCATED = "truncated"
    """The text ended before that."""
    BROKEN = "broken"
    """Something came that may not come there: no object, no JSON, or text behind the list."""


class ReadObject(NamedTuple):
    """A whole object at `start..end` of the text."""

    value: Json
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class ObjectList:
    """How far a text is a list of objects."""

    objects: tuple[ReadObject, ...]
    end: ListEnd
    sound: int
    """Characters up to the end of the last whole object, or of the opening bracket; 0 where there is none."""


def read_object_list(text: str) -> ObjectList:
    """The objects at the beginning of `text`, up to the first thing that is not JSON, no object, or not there."""
    at = _skip_space(text, 0)
    if not text.startswith("[", at):
        return ObjectList((), _end_without_bracket(text, at), 0)
    objects: list[ReadObject] = []
    sound = at + 1
    at = _skip_space(text, sound)
    is_behind_comma = False
    while text.startswith("{", at):
        found = _read_object(text, at)
        if isinstance(found, ListEnd):
            return ObjectList(tuple(objects), found, sound)
        objects.append(found)
        sound = found.end
        at = _skip_space(text, sound)
        is_behind_comma = text.startswith(",", at)
        if not is_behind_comma:
            break
        at = _skip_space(text, at + 1)
    if is_behind_comma or not text.startswith("]", at):
        return ObjectList(tuple(objects), _end_without_bracket(text, at), sound)
    is_alone = _skip_space(text, at + 1) == len(text)
    return ObjectList(tuple(objects), ListEnd.CLOSED if is_alone else ListEnd.BROKEN, sound)


def is_polygon(value: Mapping[str, Any]) -> bool:
    """Whether an object is a polygon: it has `poly`, whatever else it has."""
    return "poly" in value


def is_box(value: Mapping[str, Any]) -> bool:
    """Whether an object is a box that can be matched: four finite numbers that span an area, and a label."""
    corners, label = value.get("bbox_2d"), value.get("label")
    if not isinstance(label, str) or not label or not isinstance(corners, list) or len(corners) != 4:
        return False
    if any(isinstance(each, bool) or not isinstance(each, int | float) for each in corners):
        return False
    return all(abs(each) < math.inf for each in corners) and corners[0] < corners[2] and corners[1] < corners[3]


def find_missing(boxes: Sequence[Json], truths: Sequence[Json], least_iou: float) -> list[Json]:
    """Those of `truths` that no box of the answer matches, in their order.

    A box matches one truth at most: the one of its label that it overlaps most, by `least_iou` or more, among those
    that no box before it has matched. So a box that is said twice finds nothing the second time.
    """
    missing = list(truths)
    for box in boxes:
        rivals = [truth for truth in missing if truth["label"] == box["label"]]
        best = max(rivals, key=lambda truth: _iou(box["bbox_2d"], truth["bbox_2d"]), default=None)
        if best is not None and _iou(box["bbox_2d"], best["bbox_2d"]) >= least_iou:
            missing = [truth for truth in missing if truth is not best]
    return missing


def _iou(one: Sequence[float], other: Sequence[float]) -> float:
    """Area of the intersection over that of the union, 0 to 1."""
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    if width <= 0 or height <= 0:
        return 0.0
    areas = sum((box[2] - box[0]) * (box[3] - box[1]) for box in (one, other))
    return width * height / (areas - width * height)


def _read_object(text: str, start: int) -> ReadObject | ListEnd:
    end = _end_of_object(text, start)
    if end is None:
        return ListEnd.TRUNCATED
    try:
        return ReadObject(json.loads(text[start:end], parse_constant=refuse_constant), start, end)
    except (ValueError, RecursionError):
        return ListEnd.BROKEN


def _end_without_bracket(text: str, at: int) -> ListEnd:
    return ListEnd.TRUNCATED if at == len(text) else ListEnd.BROKEN


def _end_of_object(text: str, start: int) -> int | None:
    """Behind the brace that closes the one at `start`, strings left aside; None when the text ends before."""
    depth, at, in_string = 0, start, False
    while at < len(text):
        match text[at]:
            case "\\" if in_string:
                at += 1
            case '"':
                in_string = not in_string
            case "{" if not in_string:
                depth += 1
            case "}" if not in_string:
                depth -= 1
                if not depth:
                    return at + 1
        at += 1
    return None


def _skip_space(text: str, at: int) -> int:
    while at < len(text) and text[at] in _SPACE:
        at += 1
    return at
