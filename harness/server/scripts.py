"""Scripts in requests: permission, and conversion of their texts to ids.

The form is that of a scripted engine's script, without delays and faults. Special tokens in texts are recognized, so
tool calls use the family's syntax. With `tool_choice` the prompt already contains the beginning of the call.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec

from harness.engines.base import Capabilities
from harness.errors import MalformedRequest, ScriptRefused
from harness.server.settings import ServerSettings
from harness.sessions.script import Script, Step
from harness.tokens.chat_tokenizer import ChatTokenizer

_TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class StepText(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    text: str | None = None
    """Encoded; the end of the turn follows unless `finish` is `length`."""
    tokens: tuple[_TokenId, ...] | None = None
    """Exact ids instead of `text`."""
    finish: Literal["stop", "length"] = "stop"


class ScriptText(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`script` in the body of `POST /sessions`."""

    steps: Annotated[tuple[StepText, ...], msgspec.Meta(min_length=1)]


@dataclass(frozen=True, slots=True)
class ScriptReader:
    """Converts scripts for the sessions of one server."""

    chat_tokenizer: ChatTokenizer
    settings: ServerSettings
    capabilities: Capabilities

    def read(self, script: ScriptText) -> Script:
        """Convert the steps to ids. Raises `ScriptRefused`, or `MalformedRequest` naming an impossible step."""
        require_scripts(self.settings, self.capabilities)
        return tuple(self._read_step(step, f"script.steps[{index}]") for index, step in enumerate(script.steps))

    def _read_step(self, step: StepText, param: str) -> Step:
        if (step.text is None) == (step.tokens is None):
            came = "neither" if step.text is None else "both"
            raise MalformedRequest(f"{param}: expected text or tokens, got {came}", param=param)
        tokenizer = self.chat_tokenizer.tokenizer
        ids = list(step.tokens or ()) if step.text is None else tokenizer.encode(step.text)
        end = self.chat_tokenizer.end_of_turn_id
        if step.text is not None and step.finish == "stop" and end is not None:
            ids.append(end)
        vocab_size, room = self.capabilities.vocab_size, self.capabilities.context_length - 1
        if not 0 < len(ids) <= room:
            raise MalformedRequest(f"{param}: expected 1 to {room} tokens, got {len(ids)}", param=param)
        if max(ids) >= vocab_size:
            told = f"{param}: token id {max(ids)} is outside the vocabulary (0..{vocab_size - 1})"
            raise MalformedRequest(told, param=param)
        return Step(tuple(ids), ends_turn=ids[-1] in tokenizer.eos_ids)


def require_scripts(settings: ServerSettings, capabilities: Capabilities) -> None:
    """Raise `ScriptRefused` unless the operator and the engine allow scripts."""
    if not settings.allow_forced_tokens:
        raise ScriptRefused(
            "script: this server does not allow forced tokens; start it with --allow-forced-tokens"
            " (ServerSettings.allow_forced_tokens), for tests only",
            param="script",
        )
    if not capabilities.follows_scripts:
        raise ScriptRefused(
            f"script: {capabilities.engine} does not follow scripts, as one worker of a pool must;"
            " `harness engine up` starts engines that do",
            param="script",
        )
