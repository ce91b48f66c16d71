"""Harmony, the format of gpt-oss: an answer is a row of messages, each with a channel.

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>

`analysis` is reasoning. `final` is content, and so is `commentary` unless it is addressed `to=functions.NAME`: its body
then is a tool call, complete when `<|call|>` ends it. The prompt ends with `<|start|>assistant`.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from harness.tokens.parsing import (
    CallReader,
    CallSyntax,
    Delta,
    ParsedOutput,
    Piece,
    as_malformed,
    decode_json,
    tool_call,
    whole_calls,
)
from harness.types import Json

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_END, _CALL, _RETURN, _CONSTRAIN = "<|end|>", "<|call|>", "<|return|>", "<|constrain|>"
_ENDS = (_END, _CALL, _RETURN)
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL_NAME = re.compile(re.escape(_CHANNEL) + r"\s*(analysis|commentary|final)\b")
_ROLE = re.compile(r"(assistant)?\s*(to=\S+\s*)?")


class Harmony(CallSyntax):
    name = "harmony"
    frames_answers = True
    markers = (_START, _CHANNEL, _MESSAGE, _END, _CALL, _RETURN, _CONSTRAIN)

    def beginning(self, name: str | None) -> tuple[str, str]:
        begin = f"{_CHANNEL}commentary to=functions."
        # The text after the name contains a marker, so a required name cannot be closed here.
        return begin, name or ""

    def open(self, tools: Sequence[Json]) -> CallReader:
        return _Reader(self, tools)

    def parse(self, pieces: Sequence[Piece], tools: Sequence[Json]) -> ParsedOutput:
        """Return the parts of the messages. Anything else, or a call without `tools`, is content unchanged."""
        messages = list(_messages(pieces))
        said = [message for message in messages if message is not None]
        if len(said) < len(messages):
            return as_malformed(pieces)
        if not tools and any(message.recipient is not None for message in said):
            return ParsedOutput("".join(piece.text for piece in pieces))
        content = "\n".join(message.body for message in said if message.recipient is None and not message.is_reasoning)
        calls = [
            tool_call(message.function, decode_json(message.body)) if message.end == _CALL else None
            for message in said
            if message.recipient is not None
        ]
        parsed = whole_calls(pieces, content, calls)
        reasoning = "\n".join(message.body for message in said if message.is_reasoning)
        return parsed if parsed.malformed else ParsedOutput(content, parsed.tool_calls, reasoning=reasoning)


class _HarmonyMessage(NamedTuple):
    channel: str
    recipient: str | None
    body: str
    end: str | None

    @property
    def function(self) -> str | None:
        """Name of the called function. None for a tool that no client offers, such as `python`."""
        _, found, name = (self.recipient or "").partition("functions.")
        return name if found else None

    @property
    def is_reasoning(self) -> bool:
        return self.channel == "analysis" and self.recipient is None


class _Reader:
    """`CallReader` that returns message texts up to the first call, or the first text that is no message."""

    def __init__(self, syntax: Harmony, tools: Sequence[Json]) -> None:
        self._syntax = syntax
        self._tools = tools
        self._waiting: list[Piece] = []
        """Header of the message, or all text that waits for the end."""
        self._waits_for_end = False
        self._open: _HarmonyMessage | None = None
        self._has_reasoning = self._has_content = False
        self._commentary: list[str] = []

    def push(self, piece: Piece) -> Delta:
        if self._open is not None:
            if piece.is_marker and piece.text in _ENDS:
                self._open = None
                return Delta()
            return self._say(self._open, piece.text)
        self._waiting.append(piece)
        if self._waits_for_end or piece != Piece(_MESSAGE, is_marker=True):
            return Delta()
        message = _message("".join(each.text for each in self._waiting[:-1]), "", None)
        if message is None or message.recipient is not None:
            self._waits_for_end = True
            return Delta()
        self._waiting, self._open = [], message
        return self._say(message, self._begin(is_reasoning=message.is_reasoning))

    def end(self) -> ParsedOutput:
        commentary = "".join(self._commentary)
        if not self._waiting:
            return ParsedOutput(commentary)
        parsed = self._syntax.parse(self._waiting, self._tools)
        content = self._begin(is_reasoning=False) + parsed.content if parsed.content else ""
        reasoning = self._begin(is_reasoning=True) + parsed.reasoning if parsed.reasoning else ""
        return replace(parsed, content=commentary + content, reasoning=reasoning)

    def _begin(self, *, is_reasoning: bool) -> str:
        if is_reasoning:
            has_one, self._has_reasoning = self._has_reasoning, True
        else:
            has_one, self._has_content = self._has_content, True
        return "\n" if has_one else ""

    def _say(self, message: _HarmonyMessage, text: str) -> Delta:
        match message.channel:
            case "analysis":
                return Delta(text)
            # Reasoning may follow a commentary, and no dialect has content before it, so commentary waits for `final`.
            case "commentary":
                self._commentary.append(text)
                return Delta()
            case _:
                content = "".join(self._commentary) + text
                self._commentary.clear()
                return Delta(content=content)


def _messages(pieces: Sequence[Piece]) -> Iterator[_HarmonyMessage | None]:
    header: list[str] = []
    body: list[str] | None = None
    for piece in pieces:
        if body is None:
            if piece == Piece(_MESSAGE, is_marker=True):
                body = []
            else:
                header.append(piece.text)
        elif piece.is_marker and piece.text in _ENDS:
            yield _message("".join(header), "".join(body), piece.text)
            header, body = [], None
        else:
            body.append(piece.text)
    if body is not None:
        yield _message("".join(header), "".join(body), None)
    elif header:
        yield None


def _message(header: str, body: str, end: str | None) -> _HarmonyMessage | None:
    role, found, _ = header.removeprefix(_START).partition(_CHANNEL)
    channel = _CHANNEL_NAME.search(header)
    if not found or channel is None or _ROLE.fullmatch(role) is None:
        return None
    recipient = _RECIPIENT.search(header)
    return _HarmonyMessage(channel.group(1), recipient.group(1) if recipient else None, body, end)
