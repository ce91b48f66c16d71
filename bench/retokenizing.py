"""How often a real model samples tokens that encoding its text again would change.

    python bench/retokenizing.py [--answers 64] [--tokens 128] [--temperature 1.0]

SmolLM2 answers questions through the local engine; each answer is decoded and encoded again, as a pipeline that keeps
text would. Prints the share of answers that come back as other tokens, and the worst of them. Seeded: the same command
gives the same answers on the same machine.
"""

import argparse
import asyncio
from collections.abc import Sequence

from harness.engines.huggingface import HuggingFaceTokenProvider
from harness.models import resolve_model
from harness.tokens.chat_tokenizer import ChatTokenizer
from harness.tokens.model_family import open_chat_tokenizer
from harness.types import FinishReason, GenerationRequest, GenerationResult, SamplingParams, as_ids

MODEL = "smollm2-135m-instruct"
TOPICS = (
    "the moon",
    "bread",
    "Python lists",
    "Kyoto",
    "a contract",
    "photosynthesis",
    "the year 1848",
    "prime numbers",
)
REQUESTS = ("Explain {} in three sentences.", "Write a short table about {}.", "Give code that has to do with {}.")


async def sample(chat: ChatTokenizer, count: int, tokens: int, temperature: float) -> list[GenerationResult]:
    """Answers to `count` questions, in one batch."""
    async with HuggingFaceTokenProvider(resolve_model(MODEL)) as engine:
        return await asyncio.gather(
            *(
                engine.generate(
                    GenerationRequest(
                        as_ids(chat.render_ids([{"role": "user", "content": question(number)}], [])),
                        SamplingParams(tokens, temperature=temperature, seed=number),
                        request_id=f"{number:032x}",
                        session_id=str(number),
                    )
                )
                for number in range(count)
            )
        )


def question(number: int) -> str:
    """The question with that number."""
    return REQUESTS[number % len(REQUESTS)].format(TOPICS[number // len(REQUESTS) % len(TOPICS)])


def first_difference(chat: ChatTokenizer, ids: Sequence[int]) -> int | None:
    """The position from which the tokens of an answer come back as others."""
    again = chat.tokenizer.encode_plain(chat.tokenizer.decode(ids))
    if again == list(ids):
        return None
    return next((i for i, (a, b) in enumerate(zip(ids, again, strict=False)) if a != b), min(len(ids), len(again)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=1.0)
    options = parser.parse_args()
    chat = open_chat_tokenizer(resolve_model(MODEL))
    results = asyncio.run(sample(chat, options.answers, options.tokens, options.temperature))
    outputs = [
        result.output_ids[: -1 if result.finish_reason is FinishReason.STOP else None].tolist() for result in results
    ]
    changed = [(ids, at) for ids in outputs if (at := first_difference(chat, ids)) is not None]
    print(
        f"{len(changed)} of {len(outputs)} answers come back as other tokens ({sum(map(len, outputs))} tokens sampled)"
    )
    if changed:
        ids, at = max(changed, key=lambda one: len(one[0]) - one[1])
        print(f"worst: {len(ids) - at} of {len(ids)} tokens, from {chat.tokenizer.decode(ids[at : at + 4])!r} on")


if __name__ == "__main__":
    main()
