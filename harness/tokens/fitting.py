"""Check, at a bounded cost, that a request can fit into a context.

Rendering and encoding a text takes hundreds of times its size in memory, in vain if it does not fit. So the longest
token first bounds the text, which is free. Then the text is encoded in pieces, which are discarded, until there are too
many tokens.
"""

from collections.abc import Sequence

import msgspec

from harness.errors import PromptTooLong
from harness.tokens.tokenizer import Tokenizer
from harness.types import Json, Message, Paced

_PIECE = 50_000  # characters, tens of milliseconds of encoding
_ALLOWANCE = 4  # tokens that one cut may add, so that a text that fits is not refused
# Templates may omit what the assistant said (usually earlier reasoning), names and ids, and never the other texts. So
# all texts together may be longer than the context by this factor.
_LENIENCE = 4


def require_possible(tokenizer: Tokenizer, messages: int, told: int, said: int, context_length: int) -> None:
    """Raise `PromptTooLong` if no encoding of so many `messages` fits into `context_length` tokens. Costs nothing.

    `told` counts the characters that a template must keep, `said` those that it may omit.
    """
    if messages > context_length:
        raise PromptTooLong(
            f"{messages} messages cannot fit into the model's context of {context_length} tokens",
            tokens=messages,
            context_length=context_length,
            param="messages",
        )
    most = context_length * tokenizer.longest_token
    for characters, bound in ((told, most), (said, _LENIENCE * most)):
        if characters > bound:
            raise PromptTooLong(
                f"the request has {characters} characters, the model's context of {context_length} tokens holds"
                f" {most} at the very most; shorten the conversation",
                tokens=max(context_length + 1, characters // tokenizer.longest_token),
                context_length=context_length,
                param="messages",
            )


def require_fitting(
    tokenizer: Tokenizer, messages: Sequence[Message], tools: Sequence[Json], context_length: int, paced: Paced = iter
) -> None:
    """Raise `PromptTooLong` as soon as the request is known to exceed `context_length` tokens."""
    told, said = texts_of(messages, tools)
    _require_count(tokenizer, told, context_length, context_length, paced)
    _require_count(tokenizer, [*told, *said], _LENIENCE * context_length, context_length, paced)


def _require_count(tokenizer: Tokenizer, texts: Sequence[str], most: int, context_length: int, paced: Paced) -> None:
    left_bytes = sum(len(text) if text.isascii() else len(text.encode()) for text in texts)
    tokens = 0
    for piece in paced(text[start : start + _PIECE] for text in texts for start in range(0, len(text), _PIECE)):
        if tokens + left_bytes <= most:  # no token is shorter than a byte
            return
        tokens += max(0, tokenizer.count_plain(piece) - _ALLOWANCE * (len(piece) == _PIECE))
        left_bytes -= len(piece) if piece.isascii() else len(piece.encode())
        if tokens > most:
            raise PromptTooLong(
                f"the request has more than {tokens} tokens of text, the model's context is {context_length};"
                " shorten the conversation",
                tokens=max(tokens, context_length + 1),
                context_length=context_length,
                param="messages",
            )


def texts_of(messages: Sequence[Message], tools: Sequence[Json]) -> tuple[list[str], list[str]]:
    """Return the texts that a template must keep, and those that it may omit."""
    told: list[str] = []
    said: list[str] = []
    for message in messages:
        (said if message["role"] == "assistant" else told).append(message.get("content") or "")
        said.extend(message.get(field) or "" for field in ("reasoning_content", "name", "tool_call_id"))
        for call in message.get("tool_calls") or ():
            said.extend((call.get("id") or "", call["function"]["name"], call["function"]["arguments"]))
    if tools:
        told.append(msgspec.json.encode(tools).decode())
    return told, said
