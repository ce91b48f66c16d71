"""Compares two engines token by token on greedy continuations of fixed prompts (`closeness`).

Meant for engines with the same weights: a difference beyond rounding is a wrong template, another dtype, stale weights
or another logprob scale.
"""

from dataclasses import dataclass
from uuid import uuid4

from harness.engines.base import TokenProvider
from harness.engines.examine.closeness import ClosenessReport, check_logprobs_close
from harness.tokens.chat_tokenizer import ChatTokenizer
from harness.types import GenerationRequest, Json, SamplingParams, as_ids

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
