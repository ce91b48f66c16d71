"""From logits to tokens: the right distribution, the right filters, nothing but seed and position.

Every worker collects this file, and one runs it: that one imports torch.
"""

import numpy as np
import pytest

from harness.errors import EngineReplyInvalid
from harness.types import SamplingParams
from tests.thoroughness import examples

pytestmark = pytest.mark.xdist_group("torch")

PROBABILITIES = np.array([0.5, 0.25, 0.15, 0.07, 0.03])


def draw(count: int, probabilities: np.ndarray = PROBABILITIES, **options: object) -> np.ndarray:
    """`count` tokens at different positions, as frequencies."""
    import torch

    from harness.engines.huggingface.sampling import SamplingRow, sample

    logits = torch.from_numpy(np.log(probabilities)).float().expand(count, -1)
    rows = [SamplingRow(SamplingParams(1, **options), 7, position) for position in range(count)]
    tokens = [sampled.token_id for sampled in sample(logits, rows)]
    return np.bincount(tokens, minlength=probabilities.size) / count


def must_follow(expected: np.ndarray, full: int, **options: object) -> None:
    """As many tokens as the tests are thorough, as close to `expected` as so many can be."""
    count = examples(full)
    np.testing.assert_allclose(draw(count, **options), expected, atol=1.35 / count**0.5)


def test_tokens_follow_the_model_s_distribution() -> None:
    """At temperature 1, without filters."""
    must_follow(PROBABILITIES, 8_000)


def test_temperature_sharpens() -> None:
    """Temperature 0.5 squares the odds."""
    squared = PROBABILITIES**2 / (PROBABILITIES**2).sum()

    must_follow(squared, 8_000, temperature=0.5)


def test_temperature_0_takes_the_most_likely() -> None:
    assert draw(50, temperature=0.0).tolist() == [1, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"top_k": 2}, 2),
        ({"top_k": 100}, 5),
        ({"top_p": 0.5}, 1),
        ({"top_p": 0.51}, 2),
        ({"top_p": 0.9}, 3),
        ({"min_p": 0.2}, 3),
        ({"top_k": 3, "top_p": 0.6}, 2),
    ],
)
def test_filters_keep_the_likely_tokens(options: dict[str, float], kept: int) -> None:
    expected = np.where(np.arange(5) < kept, PROBABILITIES, 0)

    must_follow(expected / expected.sum(), 3_000, **options)


def test_top_p_of_a_flat_distribution_is_exact() -> None:
    """Also when it keeps more tokens than the shortcut looks at."""
    flat = np.full(4096, 1 / 4096)
    flat[:2048] *= 1.001

    assert draw(examples(3_000), flat / flat.sum(), top_p=0.5)[2048:].sum() == 0


def test_rare_tokens_stay_rare() -> None:
    """A large vocabulary of impossible tokens is never sampled by a coarse random number."""
    probabilities = np.full(49152, 1e-12)
    probabilities[0] = 1 - 49151e-12

    assert draw(examples(300), probabilities)[0] == 1


def test_logprobs_do_not_depend_on_temperature_and_filters() -> None:
    import torch

    from harness.engines.huggingface.sampling import SamplingRow, sample

    logits = torch.from_numpy(np.log(PROBABILITIES)).float()[None]
    row = SamplingRow(SamplingParams(1, temperature=0.1, top_k=1, top_logprobs=2), 0, 0)
    [sampled] = sample(logits, [row])

    assert sampled.logprob == pytest.approx(np.log(0.5))
    assert sampled.top_ids == [0, 1]
    assert sampled.top_logprobs == pytest.approx(np.log([0.5, 0.25]))


def test_logits_that_are_not_numbers_are_an_error() -> None:
    import torch

    from harness.engines.huggingface.sampling import SamplingRow, sample

    with pytest.raises(EngineReplyInvalid, match="broken"):
        sample(torch.full((1, 5), torch.nan), [SamplingRow(SamplingParams(1), 0, 0)])
