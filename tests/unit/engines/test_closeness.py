"""The closeness report says where two engines differ, by how much, and whether it matters."""

from collections.abc import Sequence

import numpy as np
import pytest

from harness.engines.examine.comparison import check_logprobs_close
from harness.top_logprobs import TopLogprobs
from harness.types import FinishReason, GenerationResult, VersionSpan, as_ids, as_logprobs


def generation(ids: Sequence[int], logprobs: Sequence[float], *others: Sequence[int]) -> GenerationResult:
    """A greedy generation; `others` are the second best tokens of each position and so on."""
    columns = np.asarray([ids, *others], dtype=np.int32).T
    values = np.asarray([np.asarray(logprobs) - rank for rank in range(columns.shape[1])], dtype=np.float32).T
    return GenerationResult(
        request_id="0" * 32,
        input_ids=as_ids([1, 2]),
        output_ids=as_ids(ids),
        logprobs=as_logprobs(logprobs),
        finish_reason=FinishReason.LENGTH,
        version_spans=(VersionSpan("0", 0, len(ids)),),
        top_logprobs=TopLogprobs(columns, values),
    )


def test_equal_generations_are_close():
    """Nothing differs, and the report counts what was compared."""
    one = generation([5, 6], [-0.5, -1.0], [7, 7])
    report = check_logprobs_close(one, one, atol=0.0, top_k=2)

    assert report.is_close
    assert report.render() == "close: 2 positions compared; largest difference 0.0000, mean 0.0000"


def test_a_logprob_too_far_away_is_reported_with_both_values():
    """Position, token, values and ranks are on one line."""
    a = generation([5, 6], [-0.5, -1.0], [7, 7])
    b = generation([5, 6], [-0.5, -1.5], [7, 7])
    report = check_logprobs_close(a, b, atol=0.1, top_k=2)

    assert not report.is_close
    assert report.largest == 0.5
    assert report.render(lambda token: f"<{token}>").splitlines()[1] == (
        "  position 1: a '<6>' (6) -1.0000, b '<6>' (6) -1.5000, difference 0.5000; b's token ranks 1 for a,"
        " a's token ranks 1 for b"
    )


def test_a_near_tie_may_fall_either_way():
    """Each one has the other's token among its best; what follows is not compared."""
    a = generation([5, 6, 1], [-0.5, -1.0, -9.0], [7, 8, 7])
    b = generation([5, 8, 2], [-0.5, -1.1, -0.1], [7, 6, 7])
    report = check_logprobs_close(a, b, atol=0.01, top_k=2)

    assert report.is_close
    assert (report.compared, report.diverged_at) == (2, 1)


def test_a_token_that_the_other_engine_would_not_say_is_not_close():
    """It is outside the best of the other engine."""
    a = generation([5, 6], [-0.5, -1.0], [7, 8])
    b = generation([5, 9], [-0.5, -1.0], [7, 8])
    report = check_logprobs_close(a, b, atol=0.5, top_k=2)

    assert not report.is_close
    assert "outside the best" in report.render()


def test_long_lists_of_differences_are_cut():
    a = generation([5] * 30, [-1.0] * 30, [7] * 30)
    b = generation([5] * 30, [-2.0] * 30, [7] * 30)

    assert check_logprobs_close(a, b, atol=0.5, top_k=2).render().endswith("and 20 more")


@pytest.mark.parametrize("top_k", [3, 20])
def test_too_few_alternatives_are_refused(top_k: int):
    """A rank cannot be known beyond what was asked for."""
    one = generation([5], [-0.5], [7])
    with pytest.raises(ValueError, match="alternatives per token"):
        check_logprobs_close(one, one, atol=0.1, top_k=top_k)
