"""Messages that cannot forge markers in any template or renderer.

A marker in a message is replaced by a private-use character before rendering. All markers in the rendered text are then
the template's own, and the private characters are encoded as ordinary text.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from harness.errors import MalformedRequest
from harness.tokens.tokenizer import Tokenizer
from harness.types import Json, Message

_PRIVATE_USE = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))
_PRIVATE = re.compile("[" + "".join(f"{chr(codes[0])}-{chr(codes[-1])}" for codes in _PRIVATE_USE) + "]")
_STRETCH = 100_000  # characters; a search holds the GIL until it is done


class GuardedMessages:
    """Messages without markers, and the encoder of text rendered from them. Assistant messages keep the `kept` ones."""

    def __init__(
        self, tokenizer: Tokenizer, messages: Sequence[Message], tools: Sequence[Json], kept: Collection[str] = ()
    ) -> None:
        """Raise `MalformedRequest` if no private character is left to stand for a marker."""
        self.messages, self.tools = messages, tools
        self._tokenizer = tokenizer
        texts = set(_strings([messages, tools]))  # a set: most are keys and roles, which repeat
        found = {marker.group() for text in texts if text for marker in tokenizer.find_markers(text)}
        self._placeholders = _placeholders(found, texts) if found else {}
        if found:
            all_hidden = self._placeholders
            own_kept = {marker: each for marker, each in all_hidden.items() if marker not in kept}
            self.messages = [
                _hide(message, own_kept if message.get("role") == "assistant" else all_hidden) for message in messages
            ]
            self.tools = _hide(tools, all_hidden)

    @property
    def has_markers(self) -> bool:
        return bool(self._placeholders)

    def encode(self, text: str) -> list[int]:
        if not self._placeholders:
            return self._tokenizer.encode(text)
        ids: list[int] = []
        position = 0
        for marker in self._tokenizer.find_markers(text):
            ids += self._encode_plain(text[position : marker.start()])
            ids += self._tokenizer.encode(marker.group())
            position = marker.end()
        return ids + self._encode_plain(text[position:])

    def _encode_plain(self, text: str) -> list[int]:
        for marker, placeholder in self._placeholders.items():
            text = text.replace(placeholder, marker)
        return self._tokenizer.encode_plain(text)


def _placeholders(found: Collection[str], texts: Collection[str]) -> dict[str, str]:
    used = {
        character
        for text in texts
        for start in range(0, len(text), _STRETCH)
        for character in _PRIVATE.findall(text, start, start + _STRETCH)
    }
    # Longest first, so that a marker that contains another one is replaced before it.
    free = (chr(code) for codes in _PRIVATE_USE for code in codes if chr(code) not in used)
    placeholders = dict(zip(sorted(found, key=len, reverse=True), free, strict=False))
    if len(placeholders) < len(found):
        raise MalformedRequest("messages: they use every private character there is", param="messages")
    return placeholders


def _hide(value: Any, placeholders: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        for marker, placeholder in placeholders.items():
            value = value.replace(marker, placeholder)
        return value
    if isinstance(value, Mapping):
        return {_hide(key, placeholders): _hide(item, placeholders) for key, item in value.items()}
    return [_hide(item, placeholders) for item in value] if isinstance(value, Sequence) else value


def _strings(value: Any) -> Iterator[str]:
    waiting = [value]
    while waiting:
        match waiting.pop():
            case str() as text:
                yield text
            case dict() | Mapping() as mapping:
                waiting += mapping.keys()
                waiting += mapping.values()
            case list() | tuple() | Sequence() as items:
                waiting += items
