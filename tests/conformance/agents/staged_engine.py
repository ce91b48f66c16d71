"""A scripted engine that knows a side call when it sees one, and writes down what it was asked and what it said.

Agents ask beside their conversation whenever they like, so the n-th request of a session says nothing: the step is
chosen by how many replies stand in the prompt. The log is the engine's own, taken from its requests and results; what
the session server records is compared with it.
"""

from collections.abc import Sequence
from typing import NamedTuple

from harness.engines.scripted import Script, ScriptedEngine, ScriptStep
from harness.tokens.tokenizer import Tokenizer
from harness.types import GenerationRequest, GenerationResult

REPLY = "<|im_start|>assistant\n"
SIDE_ANSWER = ScriptStep(text="A title")


class Part(NamedTuple):
    """What the model says to one agent."""

    steps: Sequence[ScriptStep]
    """In the conversation, by the number of replies before."""
    side_marks: Sequence[str] = ()
    """Texts that stand in the prompts of side calls only."""
    has_tools: bool = True
    """A prompt without tools is a side call. An agent without any has no side calls, and puts words into the model's
    mouth: its requests are counted."""

    def step_of(self, prompt: str, before: int) -> int | None:
        """The step that answers `prompt`, which `before` others came before; None for a side call."""
        if not self.has_tools:
            return min(before, len(self.steps) - 1)
        is_side = any(mark in prompt for mark in self.side_marks) or "<tools>" not in prompt
        return None if is_side else min(prompt.count(REPLY) - 1, len(self.steps) - 1)


class Heard(NamedTuple):
    """One request that the engine answered."""

    step: int | None
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    text: str
    """The prompt, decoded."""


class StagedEngine(ScriptedEngine):
    """Plays a part."""

    def __init__(self, part: Part, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer, Script((SIDE_ANSWER, *part.steps)))
        self._part = part
        self.heard: list[Heard] = []
        self._asked = 0

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """Play the step that the prompt asks for."""
        asked = request.input_ids[: request.input_ids.size - request.continues]
        prompt = self._tokenizer.decode(asked.tolist())
        step = self._part.step_of(prompt, self._asked - (request.continues > 0))
        self._asked += not request.continues
        index = 0 if step is None else step + 1
        self.play_from(request.session_id or "", index + (request.continues > 0))
        result = await super().generate(request)
        self.heard.append(Heard(step, tuple(request.input_ids.tolist()), tuple(result.output_ids.tolist()), prompt))
        return result
