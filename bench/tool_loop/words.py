"""The words of the tool loop: what tools say, and what the engine samples, the same in every run."""

import json
import random
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from harness.tokens.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parent.parent.parent
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Searches the notes.",
            "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
        },
    }
]
ENDING = "<|im_end|>"
VARIETY = 64
"""Different outputs, and different texts of tools."""


@dataclass(frozen=True)
class Output:
    ids: list[int]
    logprobs: list[float]


def tool_texts(tokenizer: Tokenizer, tokens: int) -> list[str]:
    """Texts of about so many tokens."""
    return [tokenizer.decode(tokenizer.encode(_text(seed, tokens))[:tokens]) for seed in range(VARIETY)]


def outputs(tokenizer: Tokenizer, tokens: int) -> list[Output]:
    return [_output(tokenizer, seed, tokens) for seed in range(1_000, 1_000 + VARIETY)]


def _output(tokenizer: Tokenizer, seed: int, tokens: int) -> Output:
    call = json.dumps({"name": "search", "arguments": {"query": _text(seed, tokens)}})
    ids = tokenizer.encode(f"<tool_call>\n{call}\n</tool_call>{ENDING}")
    # What is too much is left out of the middle: a seam between ids that no encoder has to agree with.
    ids = ids[: tokens // 2] + ids[tokens // 2 - tokens :]
    drawn = np.random.default_rng(seed).exponential(0.5, tokens).astype(np.float32)
    return Output(ids, [-float(each) for each in drawn])


def _text(seed: int, tokens: int) -> str:
    """Rather more than so many tokens of any vocabulary that was made for English."""
    return " ".join(random.Random(seed).choices(_words(), k=tokens))


@cache
def _words() -> list[str]:
    pages = sorted((ROOT / "docs").glob("*.md"))
    return re.findall(r"[A-Za-z0-9_.,;:()'-]+", "\n".join(page.read_text() for page in pages))
