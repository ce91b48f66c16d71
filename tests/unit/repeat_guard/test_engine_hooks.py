"""What the hooks inside SGLang's and vLLM's schedulers decide, on requests that have what the hooks look at.

The engines themselves are held to it in `tests/engines/real`; here are the cases that a CPU cannot produce, such as a
step of speculative decoding that accepts several tokens.
"""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from server_patch.repeat_terminate import RepeatTerminateConfig
from server_patch.repeat_terminate.attach import Guard
from server_patch.repeat_terminate.sglang_plugin import FinishHook, marked
from server_patch.repeat_terminate.vllm_plugin import StopHook

CONFIG = RepeatTerminateConfig(enabled=True, min_new_tokens=2, max_consecutive_token_repeats=4, ngram_size=0)
GUARD = Guard(CONFIG, CONFIG.digest())


class Reason:
    """A finish reason of SGLang."""

    def __init__(self, length: int | None = None) -> None:
        self.length = length

    def to_json(self) -> dict[str, Any]:
        return {"type": type(self).__name__.lower()} | ({} if self.length is None else {"length": self.length})


class Length(Reason):
    """By the budget, or by the guard."""


class Stop(Reason):
    """By a token or a string."""


class Abort(Reason):
    """By somebody."""


@dataclass
class Request:
    """As much of a request of SGLang as the hook sees."""

    output_ids: list[int] = field(default_factory=list)
    origin_input_ids: tuple[int, ...] = (1, 5, 5, 5)
    sampling_params: Any = field(default_factory=lambda: SimpleNamespace(custom_params=None))
    finished_reason: Reason | None = None
    finished_len: int | None = None

    def step(self, tokens: list[int], end: Reason | None = None, length: int | None = None) -> dict[str, Any] | None:
        """The engine accepts `tokens` and finds `end`, maybe in their middle; what the request then says of its end."""

        def original(request: Request, accepted: int) -> None:
            assert accepted == len(tokens)
            request.finished_reason, request.finished_len = end, length

        self.output_ids.extend(tokens)
        HOOK(original, self, len(tokens))
        reason = self.finished_reason
        return None if reason is None else marked(type(reason).to_json, reason)


HOOK = FinishHook(GUARD, SimpleNamespace(FINISH_LENGTH=Length, FINISH_ABORT=Abort))
ENDED = {"type": "length", "length": 5, "repeat_terminate": 1, "matched": "\0repeat_terminate"}


def test_sglang_ends_where_the_fourth_of_a_kind_is_accepted() -> None:
    """In the middle of a step, whose later tokens are not in the output."""
    request = Request()
    assert request.step([7, 5, 5]) is None
    assert request.step([5, 5, 5, 9]) == ENDED
    assert (request.finished_len, request.output_ids[: request.finished_len]) == (5, [7, 5, 5, 5, 5])


@pytest.mark.parametrize(
    ("end", "length", "told"),
    [
        (Stop(), 7, ENDED),
        (Stop(), 6, ENDED),
        (Stop(), 5, {"type": "stop", "repeat_terminate": 0}),
        (Stop(), 3, {"type": "stop", "repeat_terminate": 0}),
        (Length(7), 7, ENDED),
        (Length(5), 5, {"type": "length", "length": 5, "repeat_terminate": 0}),
        (Abort(), None, {"type": "abort", "repeat_terminate": 0}),
        (Stop(), None, ENDED),
    ],
    ids=[
        "stop two later",
        "stop one later",
        "same token",
        "stop before",
        "budget later",
        "budget",
        "abort",
        "at its end",
    ],
)
def test_the_earlier_end_of_one_step_counts_and_an_abort_always(
    end: Reason, length: int | None, told: dict[str, Any]
) -> None:
    """On the same token the engine's own reason stands: the sequence was over."""
    assert Request().step([7, 5, 5, 5, 5, 8, 9], end, length) == told


def test_sglang_says_nothing_about_a_request_that_runs_and_leaves_one_that_has_ended() -> None:
    """Its scheduler asks once more for requests that are over."""
    request = Request()
    assert request.step([7, 8]) is None

    request.finished_reason = ended = Stop()
    HOOK(lambda *_: pytest.fail("asked"), request, 1)
    assert request.finished_reason is ended


def test_sglang_counts_a_prefix_and_answers_a_probe() -> None:
    """Both travel in `custom_params`."""
    continued = Request(sampling_params=SimpleNamespace(custom_params={"repeat_prefix_len": 3}))
    probed = Request(sampling_params=SimpleNamespace(custom_params={"repeat_probe": 1}))

    assert continued.step([5]) == ENDED | {"length": 1}
    assert probed.step([]) is None
    assert probed.step([9]) == {"type": "length", "length": 1, "repeat_terminate": 0, "repeat_probe": GUARD.digest}


def test_an_end_that_the_guard_did_not_see_carries_no_mark() -> None:
    """Beam search ends its groups elsewhere; 0 would claim that somebody had looked."""
    assert marked(Stop.to_json, Stop()) == {"type": "stop"}


def ask_vllm(arguments: Any, tokens: list[int], stops_at: int = 99) -> tuple[int, Any, Any]:
    """How many tokens vLLM accepts, and with which status and stop reason it ends; it would stop at `stops_at`."""
    hook = StopHook(GUARD, "REPETITION")
    params = SimpleNamespace(extra_args=arguments)
    request = SimpleNamespace(
        output_token_ids=[], prompt_token_ids=[1, 5, 5, 5], sampling_params=params, status="RUNNING", stop_reason=None
    )

    def original(asked: Any, longest: int) -> bool:
        assert longest == 100
        asked.status = "STOPPED" if len(asked.output_token_ids) == stops_at else asked.status
        return asked.status == "STOPPED"

    for token in tokens:
        request.output_token_ids.append(token)
        if hook(original, request, 100):
            break
    return len(request.output_token_ids), request.status, request.stop_reason


@pytest.mark.parametrize(
    ("arguments", "stops_at", "told"),
    [
        (None, 99, (5, "REPETITION", "repeat_terminate")),
        ({"repeat_prefix_len": 0}, 4, (4, "STOPPED", None)),
        (None, 5, (5, "STOPPED", None)),
        ({"repeat_prefix_len": 3}, 99, (5, "REPETITION", "repeat_terminate")),
        ({"repeat_probe": 1}, 99, (1, "REPETITION", f"repeat_terminate:{GUARD.digest}")),
    ],
    ids=["ended", "stops before", "same token", "prefix", "probe"],
)
def test_vllm_is_asked_after_every_token(arguments: Any, stops_at: int, told: tuple[int, Any, Any]) -> None:
    """Also when a step accepts several; its own end on the same token stands."""
    assert ask_vllm(arguments, [7, 5, 5, 5, 5, 5, 9], stops_at) == told


def test_vllm_counts_a_prefix() -> None:
    assert ask_vllm({"repeat_prefix_len": 3}, [5, 5, 5]) == (1, "REPETITION", "repeat_terminate")
