"""From the engine's signal to turn, sample, ledger and client; and the look at the boundary that believes nothing."""

from dataclasses import replace

import pytest
from msgspec import structs

from harness.dialects.model_request import ModelAnswer, WireCall
from harness.dialects.openai_chat import OpenAIChat
from harness.dialects.openai_chat_request import parse_request
from harness.engines.pool.pool import EnginePool
from harness.engines.repeat_guard import Disagreement, SignalCheck
from harness.engines.scripted import ScriptedEngine
from harness.errors import ScenarioError
from harness.samples.delivery import plan_delivery
from harness.samples.merge import build_samples
from harness.sessions.ledger import account
from harness.turn_ends import TurnEnd
from harness.types import FinishReason, SampleStatus, Turn, as_ids, as_logprobs
from server_patch.repeat_terminate import RepeatTerminateConfig
from tests.builders import body as chat_body
from tests.builders import new_session, take_turn, toy_tokenizer, user

LIMITS = RepeatTerminateConfig(enabled=True, min_new_tokens=4, max_consecutive_token_repeats=4, ngram_size=0)
CHECK = SignalCheck(LIMITS, [])


def repeated(*, forced: int = 0) -> Turn:
    """A turn that the guard ended after four equal tokens, and `forced` ones that it added."""
    turn = take_turn(new_session(), [user("hi")], "aaaa" + "!" * forced, reason=FinishReason.REPEAT)
    return structs.replace(turn, end=TurnEnd.REPEAT, forced_tokens=forced)


def with_output(ids: list[int], end: TurnEnd) -> Turn:
    turn = take_turn(new_session(), [user("hi")])
    return structs.replace(turn, output_ids=as_ids(ids), logprobs=as_logprobs([-1.0] * len(ids)), end=end)


def test_the_sample_carries_the_signal() -> None:
    (ended,) = build_samples(plan_delivery([repeated()]), {})
    (other,) = build_samples(plan_delivery([take_turn(new_session(), [user("hi")])]), {})

    assert (ended.repeat_terminated, ended.status) == (1, SampleStatus.TRUNCATED)
    assert other.repeat_terminated == 0


def test_a_forced_token_is_delivered_and_not_trained() -> None:
    turn = repeated(forced=1)
    (sample,) = build_samples(plan_delivery([turn]), {})
    ledger = account([turn], turn.output_ids.size, plan_delivery([turn]))

    assert sample.loss_mask.tolist() == [1, 1, 1, 1, 0]
    assert (ledger.trained, ledger.masked, ledger.difference) == (4, 1, 0)


@pytest.mark.parametrize(("is_guarded", "signal"), [(True, {"repeat_terminate_triggered": 1}), (False, None)])
def test_plain_chat_clients_read_the_signal_where_a_guard_is_active(is_guarded: bool, signal: object) -> None:
    """Beside the words they know: for them it is a limit."""
    request = parse_request(WireCall(chat_body([user("hi")])))
    answer = ModelAnswer(request, repeated(), "m", toy_tokenizer().token_text, is_guarded=is_guarded)
    body = OpenAIChat().answer(answer)

    assert (body["choices"][0]["finish_reason"], body.get("harness")) == ("length", signal)


@pytest.mark.parametrize(
    ("ids", "end", "disagreement"),
    [
        ([9, 5, 5, 5, 5], TurnEnd.REPEAT, None),
        ([9, 8, 7, 6, 5], TurnEnd.MODEL, None),
        ([], TurnEnd.DRAINED, None),
        ([9, 5, 5, 5, 5], TurnEnd.MODEL, None),
        ([9, 5, 5, 5, 5], TurnEnd.LENGTH, None),
        ([9, 5, 5, 5, 5, 3], TurnEnd.MODEL, Disagreement(signaled=False, expected_at=4, output_tokens=6)),
        ([9, 5, 5, 5], TurnEnd.REPEAT, Disagreement(signaled=True, expected_at=None, output_tokens=4)),
        ([9, 5, 5, 5, 5, 5], TurnEnd.REPEAT, Disagreement(signaled=True, expected_at=4, output_tokens=6)),
        ([], TurnEnd.REPEAT, Disagreement(signaled=True, expected_at=None, output_tokens=0)),
    ],
    ids=[
        "ended where it must",
        "nothing to end",
        "nothing at all",
        "the model ended it at that token",
        "the budget ended it at that token",
        "should have been ended",
        "ended without reason",
        "ended too late",
        "ended before it began",
    ],
)
def test_a_signal_that_the_tokens_do_not_bear_out_is_noticed(
    ids: list[int], end: TurnEnd, disagreement: Disagreement | None
) -> None:
    assert CHECK.disagreement(with_output(ids, end)) == disagreement


def test_a_forced_token_is_not_held_against_the_signal() -> None:
    assert CHECK.disagreement(repeated(forced=1)) is None


async def test_the_workers_of_a_pool_run_one_guard() -> None:
    guarded, other = ScriptedEngine(toy_tokenizer()), ScriptedEngine(toy_tokenizer())
    guarded.capabilities = replace(guarded.capabilities, repeat_guard=LIMITS.digest())

    async with EnginePool([guarded]) as pool:
        assert pool.capabilities.repeat_guard == LIMITS.digest()
    with pytest.raises(ScenarioError, match=r"repeat_guard is .* and None"):
        async with EnginePool([guarded, other]):
            pass
