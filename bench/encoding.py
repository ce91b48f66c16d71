"""What encoding a turn costs in a long session, beside a short one.

    python bench/encoding.py [--json] [--tokenizer DIR]

A turn of 500 new tokens is encoded behind a session of 1 000 and one of 100 000 tokens, the way the server does it:
only what is new. Their ratio shows that a turn's cost does not grow with the session (I11). Beside it, what rendering
and encoding the whole conversation again would cost.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter

from harness.tokens.chat_tokenizer import ChatTokenizer, SampledTurn
from harness.tokens.model_family import open_chat_tokenizer
from harness.types import Message, TokenIds, as_ids

SHORT, LONG, TURN = 1_000, 100_000, 500
ROUNDS = 200
WHOLE_ROUNDS = 3
TAIL = 256  # as the server passes
WORDS = "The quick brown fox jumps over the lazy dog and finds 42 reasons to come back. "


def text_of(chat: ChatTokenizer, tokens: int) -> str:
    """A text of about so many tokens."""
    per_words = len(chat.tokenizer.encode(WORDS * 10)) / 10
    return WORDS * round(tokens / per_words)


@dataclass(frozen=True)
class Recorded:
    """A session whose last turn has been answered, as the server holds it."""

    messages: list[Message]
    prompt_ids: TokenIds
    output_ids: TokenIds

    @classmethod
    def of(cls, chat: ChatTokenizer, tokens: int) -> "Recorded":
        """A conversation of about so many tokens, in rounds of a question and an answer of 250 each."""
        text = text_of(chat, 250)
        rounds = [
            [{"role": "user", "content": text}, {"role": "assistant", "content": text}] for _ in range(tokens // 500)
        ]
        messages = [message for messages in rounds for message in messages]
        output = [*chat.tokenizer.encode(text), min(chat.tokenizer.eos_ids)]
        return cls(messages, as_ids(chat.render_ids(messages[:-1], [])), as_ids(output))

    def encode_turn(self, chat: ChatTokenizer, new: list[Message]) -> list[int]:
        """What the server does for the next turn of this session."""
        turn = SampledTurn(
            self.messages[-1],
            self.output_ids.tolist(),
            self.prompt_ids[-TAIL:].tolist(),
            opens_with_system=self.messages[0]["role"] == "system",
            after_tools=any(message["role"] == "tool" for message in self.messages),
        )
        return chat.extend_ids(turn, new, []) or []


def time_ms(work: Callable[[], object]) -> float:
    """Time of one call, in milliseconds."""
    began = perf_counter()
    work()
    return (perf_counter() - began) * 1_000


def measure(chat: ChatTokenizer) -> dict[str, float]:
    """Milliseconds per turn, and their ratio; rounds alternate, so that a busy machine slows both alike."""
    new: list[Message] = [{"role": "user", "content": text_of(chat, TURN)}]
    sessions = {tokens: Recorded.of(chat, tokens) for tokens in (SHORT, LONG)}
    turns: dict[int, list[float]] = {tokens: [] for tokens in sessions}
    whole: dict[int, list[float]] = {tokens: [] for tokens in sessions}
    for number in range(ROUNDS):
        for tokens, session in sessions.items():
            turns[tokens].append(time_ms(partial(session.encode_turn, chat, new)))
            if number < WHOLE_ROUNDS:
                whole[tokens].append(time_ms(partial(chat.render_ids, [*session.messages, *new], [])))
    figures = {f"turn_{tokens}_ms": statistics.median(times) for tokens, times in turns.items()}
    figures |= {f"whole_{tokens}_ms": statistics.median(times) for tokens, times in whole.items()}
    return figures | {"ratio": figures[f"turn_{LONG}_ms"] / figures[f"turn_{SHORT}_ms"]}


def toy_folder(directory: Path) -> Path:
    """The tokenizer of the tests, which needs no download."""
    from tests.toy_model import write_toy_model

    return write_toy_model(directory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--tokenizer", type=Path, help="a HuggingFace folder; by default the tests' byte tokenizer")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        chat = open_chat_tokenizer(options.tokenizer or toy_folder(Path(directory)))
        figures = measure(chat)
    if options.json:
        print(json.dumps(figures, indent=2))
        return
    for tokens in (SHORT, LONG):
        turn, whole = figures[f"turn_{tokens}_ms"], figures[f"whole_{tokens}_ms"]
        print(f"session of {tokens:>7,} tokens: a turn of {TURN} takes {turn:.2f} ms, all of it again {whole:.1f} ms")
    print(f"ratio {figures['ratio']:.2f} (at most 1.5 wanted)")


if __name__ == "__main__":
    main()
