"""Compares two engines token by token on greedy continuations of fixed prompts.

With the same weights, tokens and logprobs agree up to numerics until rounding decides between near-equal candidates.
Nothing later is compared. There the engines are close if each ranks the other's choice among its best. A difference
beyond rounding is a wrong template, another dtype, stale weights or another logprob scale.
"""

from collections.abc import Callable
from dataclasses import dataclass
from uuid import uuid4

from harness.engines.base import TokenProvider
from harness.tokens.chat_tokenizer import ChatTokenizer
from harness.types import GenerationRequest, GenerationResult, Json, SamplingParams, as_ids

_SHOWN = 10


@dataclass(frozen=True, slots=True)
class Choice:
    token_id: int
    logprob: float
    rank_of_other: int | None
    """Rank, from 1, of the other engine's token; None if not an alternative."""


@dataclass(frozen=True, slots=True)
class TokenDifference:
    """Position where the engines are not close."""

    position: int
    a: Choice
    b: Choice

    @property
    def size(self) -> float:
        """Difference in nats."""
        return abs(self.a.logprob - self.b.logprob)


@dataclass(frozen=True, slots=True)
class ClosenessReport:
    compared: int
    """Positions, including the first with different tokens."""
    differences: tuple[TokenDifference, ...]
    """Positions that are not close, in order."""
    largest: float
    """Largest logprob difference of equal tokens, in nats."""
    mean: float
    diverged_at: int | None
    """Position of the first different tokens, or None."""

    @property
    def is_close(self) -> bool:
        """True if positions were compared and all are close."""
        return self.compared > 0 and not self.differences

    def render(self, token_text: Callable[[int], str] = str) -> str:
        """Format the report as text; `token_text` shows a token id."""
        diverged = "" if self.diverged_at is None else f", other tokens from {self.diverged_at} on"
        summary = (
            f"{'close' if self.is_close else 'NOT close'}: {self.compared} positions compared{diverged};"
            f" largest difference {self.largest:.4f}, mean {self.mean:.4f}"
        )
        lines = [summary]
        for difference in self.differences[:_SHOWN]:
            a, b = difference.a, difference.b
            lines.append(
                f"  position {difference.position}: a {token_text(a.token_id)!r} ({a.token_id}) {a.logprob:.4f},"
                f" b {token_text(b.token_id)!r} ({b.token_id}) {b.logprob:.4f}, difference {difference.size:.4f};"
                f" b's token ranks {_rank(a)} for a, a's token ranks {_rank(b)} for b"
            )
        if len(self.differences) > _SHOWN:
            lines.append(f"  and {len(self.differences) - _SHOWN} more")
        return "\n".join(lines)


def check_logprobs_close(a: GenerationResult, b: GenerationResult, *, atol: float, top_k: int) -> ClosenessReport:
    """Compare two generations from one input, with at least `top_k` alternatives per token.

    Equal tokens are close within `atol` nats; the first different ones if each is in the other's `top_k`. Raises
    `ValueError` if not comparable.
    """
    if a.input_ids.tolist() != b.input_ids.tolist():
        raise ValueError("expected two continuations of one input, got two inputs")
    for side in (a, b):
        if side.top_logprobs is None or (side.output_ids.size and side.top_logprobs.ids.shape[1] < top_k):
            raise ValueError(f"expected {top_k} alternatives per token; ask for them with SamplingParams.top_logprobs")
    length = min(a.output_ids.size, b.output_ids.size)
    diverged_at = next((i for i in range(length) if a.output_ids[i] != b.output_ids[i]), None)
    equal = length if diverged_at is None else diverged_at
    sizes = abs(a.logprobs[:equal] - b.logprobs[:equal])
    far = [_difference(a, b, i, top_k) for i in range(equal) if sizes[i] > atol]
    if diverged_at is not None:
        difference = _difference(a, b, diverged_at, top_k)
        if None in (difference.a.rank_of_other, difference.b.rank_of_other):
            far.append(difference)
    return ClosenessReport(
        compared=equal + (diverged_at is not None),
        differences=tuple(far),
        largest=float(sizes.max(initial=0.0)),
        mean=float(sizes.mean()) if equal else 0.0,
        diverged_at=diverged_at,
    )


def _difference(a: GenerationResult, b: GenerationResult, position: int, top_k: int) -> TokenDifference:
    return TokenDifference(position, _choice(a, b, position, top_k), _choice(b, a, position, top_k))


def _choice(own: GenerationResult, other: GenerationResult, position: int, top_k: int) -> Choice:
    assert own.top_logprobs is not None
    best = own.top_logprobs.ids[position][:top_k].tolist()
    wanted = int(other.output_ids[position])
    rank = best.index(wanted) + 1 if wanted in best else None
    return Choice(int(own.output_ids[position]), float(own.logprobs[position]), rank)


def _rank(choice: Choice) -> str:
    return "outside the best" if choice.rank_of_other is None else str(choice.rank_of_other)


QUESTIONS = (
    "What is the capital of France?",
    "Count from one to ten.",
    "Name three rivers and the countries they flow through.",
    "Write a short poem about a lighthouse.",
    "Explain to a child why the sky is blue.",
    "List the prime numbers below thirty.",
    "What is 17 times 23? Think step by step.",
    "Translate to French: the cat sleeps on the warm stone.",
)


@dataclass(frozen=True, slots=True)
class Comparison:
    questions: tuple[str, ...]
    reports: tuple[ClosenessReport, ...]

    @property
    def is_close(self) -> bool:
        return all(report.is_close for report in self.reports)

    @property
    def largest(self) -> float:
        return max(report.largest for report in self.reports)

    @property
    def mean(self) -> float:
        """Mean difference over all compared positions, in nats."""
        compared = sum(report.compared for report in self.reports)
        return sum(report.mean * report.compared for report in self.reports) / max(compared, 1)

    @property
    def same_tokens(self) -> int:
        return sum(report.diverged_at is None for report in self.reports)

    def to_json(self) -> Json:
        return {
            "is_close": self.is_close,
            "prompts": len(self.reports),
            "same_tokens": self.same_tokens,
            "positions": sum(report.compared for report in self.reports),
            "largest": self.largest,
            "mean": self.mean,
            "reports": [
                {"question": question, "compared": report.compared, "largest": report.largest, "mean": report.mean}
                | {"diverged_at": report.diverged_at, "differences": len(report.differences)}
                for question, report in zip(self.questions, self.reports, strict=True)
            ],
        }


async def compare_engines(
    a: TokenProvider, b: TokenProvider, template: ChatTokenizer, *, tokens: int, atol: float, top_k: int
) -> Comparison:
    """Continue each question greedily by `tokens` tokens on both engines, already entered."""
    params = SamplingParams(tokens, temperature=0.0, top_logprobs=top_k)
    reports = []
    for question in QUESTIONS:
        prompt = as_ids(template.render_ids([{"role": "user", "content": question}], ()))
        left = await a.generate(GenerationRequest(prompt, params, request_id=uuid4().hex))
        right = await b.generate(GenerationRequest(prompt, params, request_id=uuid4().hex))
        reports.append(check_logprobs_close(left, right, atol=atol, top_k=top_k))
    return Comparison(QUESTIONS, tuple(reports))
