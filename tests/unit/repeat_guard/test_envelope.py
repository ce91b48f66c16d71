"""The signal beside a response."""

import pytest

from server_patch.repeat_terminate.envelope import triggered_in, with_signal, wrapped

RESPONSE = {"id": "chatcmpl-1", "choices": [{"finish_reason": "length"}]}


@pytest.mark.parametrize("triggered", [True, False])
def test_the_signal_comes_back_in_both_forms(triggered: bool) -> None:
    assert triggered_in(with_signal(RESPONSE, triggered=triggered)) is triggered
    assert triggered_in(wrapped(RESPONSE, triggered=triggered)) is triggered


def test_the_additive_form_leaves_the_response_readable() -> None:
    signaled = with_signal(RESPONSE, triggered=True)

    assert signaled == {**RESPONSE, "harness": {"repeat_terminate_triggered": 1}}


def test_the_wrapped_form_leaves_the_response_untouched() -> None:
    assert wrapped(RESPONSE, triggered=False) == {"response": RESPONSE, "harness": {"repeat_terminate_triggered": 0}}


@pytest.mark.parametrize("body", [RESPONSE, {"harness": {}}, {"harness": None}, {"harness": "yes"}])
def test_no_signal_is_not_a_zero(body: dict[str, object]) -> None:
    assert triggered_in(body) is None
