"""What the repeat guard saves on a prompt that loops, and that nobody beside it notices.

    python bench/looping.py [--engine local|sglang=URL|vllm=URL] [--model NAME_OR_DIR] [--unguarded]

One prompt under greedy decoding repeats a clause for ever; beside it, sampled with fixed seeds, run some that do not.
Run it with and without the guard and compare: the tokens and seconds of the one that loops, and the digest over the ids
of the others, which must not change. A server has the guard it was started with; `--unguarded` is for the local engine.
"""

import argparse
import asyncio
import hashlib
import uuid

from harness.engines.base import TokenProvider
from harness.engines.connect import open_engine
from harness.models import resolve_model
from harness.tokens.tokenizer import Tokenizer
from harness.types import GenerationRequest, GenerationResult, SamplingParams, as_ids
from server_patch.repeat_terminate import RepeatTerminateConfig
from tests.looping_prompt import CONFIG, OTHER_PROMPTS, PROMPT_IDS  # as the tests have it

MAX_NEW_TOKENS = 256
OTHER_TOKENS = 128


async def ask_all(engine: TokenProvider, tokenizer: Tokenizer) -> list[GenerationResult]:
    """The prompt that loops first, the others after it; all at once."""
    texts = [f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n" for text in OTHER_PROMPTS]
    asked = [(as_ids(PROMPT_IDS), SamplingParams(MAX_NEW_TOKENS, temperature=0.0))]
    asked += [
        (as_ids(tokenizer.encode(text)), SamplingParams(OTHER_TOKENS, seed=seed, ignore_eos=True))
        for seed, text in enumerate(texts)
    ]
    async with engine:
        print("guard:", engine.capabilities.repeat_guard or "none")
        return await asyncio.gather(
            *(engine.generate(GenerationRequest(ids, params, request_id=uuid.uuid4().hex)) for ids, params in asked)
        )


def main() -> None:
    """Ask and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="local")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--unguarded", action="store_true")
    options = parser.parse_args()
    model_dir = resolve_model(options.model)
    tokenizer = Tokenizer.load(model_dir)
    guard = RepeatTerminateConfig() if options.unguarded else CONFIG
    engine = open_engine(options.engine, model_dir=model_dir, tokenizer=tokenizer, repeat_guard=guard)
    looping, *others = asyncio.run(ask_all(engine, tokenizer))
    print(f"loops: {looping.output_ids.size} tokens, {looping.finish_reason}, {looping.seconds:.2f} s")
    digest = hashlib.sha256(b"".join(other.output_ids.tobytes() for other in others)).hexdigest()[:16]
    print(f"others: {sum(other.output_ids.size for other in others)} tokens, ids {digest}")


if __name__ == "__main__":
    main()
