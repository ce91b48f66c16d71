"""Whether a request can fit into a context, found out at a cost that its answer bounds.

Rendering and encoding a text costs hundreds of times its size in memory, and is in vain where the text does not fit. So
it is first held against the longest token of the vocabulary, which costs nothing, and then encoded in pieces that are
thrown away, until there are too many tokens. A cut may break a token; an allowance per cut keeps a text that fits from
being refused.

Templates may leave out what the assistant said (its earlier reasoning, as a rule) and the names and ids that messages
and calls have, never what it was told: all texts together may be longer by a factor.
"""

from collections.abc import Sequence

import msgspec

from harness.errors import PromptTooLong
from harness.tokens.tokenizer import Tokenizer
from harness.types import Json, Message

_PIECE = 50_000  # characters, some tens of milliseconds
_ALLOWANCE = 4  # tokens that one cut may add
_LENIENCE = 4  # times the context, for texts with those of the assistant


def require_possible(tokenizer: Tokenizer, messages: int, told: int, said: int, context_length: int) -> None:
    """Raises `PromptTooLong` when no encoding of so many `messages` fits into `context_length` tokens.

    They have `told` characters that the model is told, and `said` that a template may leave out. Costs nothing: every
    message is one token at least, every token has so many characters at most.
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
    tokenizer: Tokenizer, messages: Sequence[Message], tools: Sequence[Json], context_length: int
) -> None:
    """Raises `PromptTooLong` as soon as `messages` and `tools` are known to be more than `context_length` tokens."""
    told, said = texts_of(messages, tools)
    _require_count(tokenizer, told, context_length, context_length)
    _require_count(tokenizer, [*told, *said], _LENIENCE * context_length, context_length)


def _require_count(tokenizer: Tokenizer, texts: Sequence[str], most: int, context_length: int) -> None:
    left_bytes = sum(len(text) if text.isascii() else len(text.encode()) for text in texts)
    tokens = 0
    for piece in (text[start : start + _PIECE] for text in texts for start in range(0, len(text), _PIECE)):
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
    """The texts that the model is told, and those that a template may leave out: earlier answers, names and ids."""
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
