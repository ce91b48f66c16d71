"""What an engine server says about a generation, and the lies it can be told to tell about it."""

from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from typing import Any

import numpy.typing as npt

from harness.token_rows import RaggedRows
from harness.top_logprobs import TopLogprobs
from harness.types import GenerationResult, Json


class Lie(StrEnum):
    """What is wrong with the answers to generations."""

    NONE = "none"
    ID_WITHOUT_LOGPROB = "one id more than logprobs"
    MISSING_LOGPROBS = "no logprobs"
    OTHER_IDS = "logprobs of other ids"
    DUPLICATE_ID = "the last id twice, counted once"
    WRONG_COUNT = "a wrong number of completion tokens"
    WRONG_PROMPT_COUNT = "a wrong number of prompt tokens"
    OUTSIDE_VOCABULARY = "an id outside the vocabulary"
    NEGATIVE_ID = "an id below 0"
    HUGE_ID = "an id that does not fit into 32 bits"
    NULL_LOGPROB = "null for a logprob"
    NAN_LOGPROB = "NaN for a logprob"
    POSITIVE_LOGPROB = "a positive logprob"
    CLAMPED_LOGPROB = "the number that stands for minus infinity"
    SPAN_GAP = "version spans with a gap"
    SPAN_OVERLAP = "version spans that overlap"
    SPAN_SHORT = "version spans that end early"
    NO_SPANS = "no version spans"
    BAD_LABEL = "a version label of weights that nobody knows"
    TOO_MANY_TOKENS = "more tokens than asked for"
    UNKNOWN_FINISH = "an unknown finish reason"
    OTHER_REQUEST = "the id of another request"
    NOT_UTF8 = "bytes that are not UTF-8"
    NOT_JSON = "HTML"
    WRONG_SHAPE = "JSON of another shape"
    TRUNCATED = "the connection breaks in the middle"
    HANG = "no answer at all"
    STATUS_400 = "400"
    STATUS_429 = "429"
    STATUS_500 = "500"
    STATUS_503 = "503"
    ERROR_EVENT = "an error object with code 503 in place of a generation"
    ABORT_503 = "an abort that carries status 503"
    PROMPT_OTHER_IDS = "prompt logprobs of other ids"
    PROMPT_SHORT = "one prompt logprob too few"
    PROMPT_MISSING = "no prompt logprobs"


STATUSES = {Lie.STATUS_400: 400, Lie.STATUS_429: 429, Lie.STATUS_500: 500, Lie.STATUS_503: 503}


@dataclass
class Told:
    """What a server says about a generation, before it is put into its protocol."""

    rid: str
    ids: list[int]
    named: list[int]
    logprobs: list[float | None]
    count: int
    prompt_count: int | None
    """None where the engine does not say."""
    finish: str
    matched: int | str | None
    spans: list[Json]
    version: str
    top: TopLogprobs | None = None
    prompt_named: list[int] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)
    status: int | None = None
    guarded: int | None = None
    """The repeat guard's mark; None without a guard."""
    probed: str | None = None
    """The guard's answer to a probe."""
    rows: npt.NDArray[Any] | None = None
    """Routed experts."""
    masks: list[list[int]] | None = None
    """Candidates of each token."""

    @classmethod
    def truth(cls, result: GenerationResult, version: str, scale: float = 1.0) -> "Told":
        """The honest answer; `scale` divides logprobs as a temperature would."""
        ids = result.output_ids.tolist()
        prompt = result.prompt_logprobs
        return cls(
            rid=result.request_id,
            ids=ids,
            named=list(ids),
            logprobs=[logprob / scale for logprob in result.logprobs.tolist()],
            count=len(ids),
            prompt_count=result.input_ids.size,
            finish=str(result.finish_reason),
            matched=result.matched_stop,
            spans=[{"version": span.version, "start": span.start, "end": span.end} for span in result.version_spans],
            version=version,
            top=result.top_logprobs,
            prompt_named=[] if prompt is None else result.input_ids[prompt.start :].tolist(),
            prompt_logprobs=[] if prompt is None else prompt.logprobs.tolist(),
            rows=None if result.rows is None else result.rows.values,
            masks=None if result.masks is None else _lists(result.masks),
        )

    def cut(self, size: int, finish: str) -> None:
        """End the output after `size` tokens."""
        del self.ids[size:], self.named[size:], self.logprobs[size:]
        self.count, self.finish, self.matched = size, finish, None
        self.spans = [span | {"end": min(span["end"], size)} for span in self.spans if span["start"] < size]

    def retract(self, sent: int) -> None:
        """End the output behind what had been sent: SGLang aborts what it has retracted in the queue."""
        self.cut(sent, self.finish)
        self.prompt_count = None

    def distorted(self, lie: Lie) -> "Told":
        """The same with `lie` in it."""
        change = _DISTORTIONS.get(lie)
        if change is not None:
            change(self)
        return self


def _lists(masks: RaggedRows) -> list[list[int]]:
    return [masks.values[start:end].tolist() for start, end in pairwise(masks.offsets)]


def _append(told: Told, token_id: int) -> None:
    told.ids.append(token_id)
    told.named.append(token_id)
    told.logprobs.append(-1.0)


def _too_many(told: Told) -> None:
    for token_id in [5] * 50:
        _append(told, token_id)
    told.count = told.spans[-1]["end"] = len(told.ids)


def _set_last(told: Told, token_id: int) -> None:
    told.ids[-1] = told.named[-1] = token_id


def _set(name: str, value: Any) -> Any:
    return lambda told: setattr(told, name, value)


def _spans(*spans: tuple[int, int]) -> Any:
    def change(told: Told) -> None:
        size = len(told.ids)
        told.spans = [{"version": "0", "start": a, "end": size if b < 0 else b} for a, b in spans]

    return change


_DISTORTIONS: dict[Lie, Any] = {
    Lie.ID_WITHOUT_LOGPROB: lambda told: (told.named.pop(), told.logprobs.pop()),
    Lie.MISSING_LOGPROBS: lambda told: (told.named.clear(), told.logprobs.clear()),
    Lie.OTHER_IDS: lambda told: told.named.__setitem__(1, told.named[1] ^ 1),
    Lie.DUPLICATE_ID: lambda told: _append(told, told.ids[-1]),
    Lie.WRONG_COUNT: lambda told: setattr(told, "count", told.count + 1),
    Lie.WRONG_PROMPT_COUNT: lambda told: setattr(told, "prompt_count", told.prompt_count + 1),
    Lie.OUTSIDE_VOCABULARY: lambda told: _set_last(told, 259),
    Lie.NEGATIVE_ID: lambda told: _set_last(told, -1),
    Lie.HUGE_ID: lambda told: _set_last(told, 2**40),
    Lie.NULL_LOGPROB: lambda told: told.logprobs.__setitem__(1, None),
    Lie.NAN_LOGPROB: lambda told: told.logprobs.__setitem__(1, float("nan")),
    Lie.POSITIVE_LOGPROB: lambda told: told.logprobs.__setitem__(1, 0.5),
    Lie.CLAMPED_LOGPROB: lambda told: told.logprobs.__setitem__(1, -9999.0),
    Lie.SPAN_GAP: _spans((0, 1), (2, -1)),
    Lie.SPAN_OVERLAP: _spans((0, 2), (1, -1)),
    Lie.SPAN_SHORT: _spans((0, 1)),
    Lie.NO_SPANS: _set("spans", []),
    Lie.BAD_LABEL: lambda told: told.spans[0].update(version="updating-1"),
    Lie.TOO_MANY_TOKENS: _too_many,
    Lie.UNKNOWN_FINISH: _set("finish", "tired"),
    Lie.OTHER_REQUEST: _set("rid", "f" * 32),
    Lie.ABORT_503: lambda told: (setattr(told, "finish", "abort"), setattr(told, "status", 503)),
    Lie.PROMPT_OTHER_IDS: lambda told: told.prompt_named and told.prompt_named.__setitem__(0, 7),
    Lie.PROMPT_SHORT: lambda told: told.prompt_named and told.prompt_named.pop(),
    Lie.PROMPT_MISSING: lambda told: (told.prompt_named.clear(), told.prompt_logprobs.clear()),
}
