"""Interface to a model family: write conversations as ids and read outputs. See `model_family.py`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

from harness.tokens.outputs.output_stream import OutputStream
from harness.tokens.parsing import ParsedOutput
from harness.tokens.tokenizer import Tokenizer
from harness.types import Json, Message


class DelimiterSource(StrEnum):
    RENDERER = "renderer"
    CACHED_SUFFIX = "cached suffix"
    """Ids kept from the first use. Only message texts are encoded."""
    PREFIX_TRICK = "prefix trick"
    """Dummy conversation rendered with the new messages."""
    FULL_RENDER = "full render"
    """No ids: the template rewrites earlier text, so the session branches."""


@dataclass(frozen=True, slots=True)
class TemplateDivergence:
    """First place where a template rewrites its earlier output."""

    conversation: str
    """Roles, such as `user assistant user`."""
    position: int
    """Index of the first differing token."""
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class FamilyDescription:
    template_digest: str
    """SHA-256."""
    delimiters: Mapping[str, DelimiterSource]
    """Sources by transition, such as `answer -> user`."""
    call_syntax: str
    renderer: str | None = None
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    divergence: TemplateDivergence | None = None
    shows_tools: bool = True
    shows_calls: bool = True
    reads_calls: bool = True
    unread_reasoning: str = ""
    """Answer of the template whose reasoning cannot be told from its content."""
    shows_late_system: bool = True
    """True if a late system message stays in place, rather than moving into a neighbor."""
    notes: Sequence[str] = field(default=())

    @property
    def faults(self) -> Sequence[str]:
        """Reasons why reasoning, tools or calls get lost, which raises no error of its own."""
        found = {
            "tools are not in the prompt: the template does not show them": not self.shows_tools,
            "tool calls cannot be checked: the template does not show earlier turns' calls": not self.shows_calls,
            f"tool calls cannot be read: the template does not write them as {self.call_syntax}": (
                self.shows_calls and not self.reads_calls
            ),
        }
        return (*self.reasoning_faults, *(fault for fault, is_found in found.items() if is_found))

    @property
    def reasoning_faults(self) -> Sequence[str]:
        """Faults of answers without tools."""
        written = self.unread_reasoning.strip()[:200]
        return [f"reasoning cannot be read: it stays in the content of {written!r}"] if written else []


class SampledTurn(NamedTuple):
    reply: Message
    output_ids: Sequence[int]
    context_ids: Sequence[int]
    """End of the prompt. A bounded tail is enough."""
    opens_with_system: bool = False
    after_tools: bool = False


class SampledOutput(NamedTuple):
    ids: Sequence[int]
    context_ids: Sequence[int] = ()
    """End of the prompt, which may have begun the reasoning."""
    forced_ids: Sequence[int] = ()
    """Prompt ids that belong to the answer: the beginning of a required call."""
    stop: str | None = None


class ChatTokenizer(Protocol):
    """Converter between messages and ids. It never encodes sampled text again (I1)."""

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer that guards the family's markers."""

    @property
    def end_of_turn_id(self) -> int | None:
        """Id that ends an answer, if the tokenizer declares one."""

    def render_ids(self, messages: Sequence[Message], tools: Sequence[Json]) -> list[int]:
        """Return the prompt for the assistant's next turn. Raises `MalformedRequest` for impossible messages."""

    def extend_ids(self, previous: SampledTurn, messages: Sequence[Message], tools: Sequence[Json]) -> list[int] | None:
        """Return the ids between the output of `previous` and the next turn, after `messages`.

        An output cut by length, an abort or a stop string is first closed with the family's own marker. None if the
        family rewrites earlier text here: the caller then renders a new branch.
        """

    def with_variables(self, variables: Mapping[str, Any]) -> "ChatTokenizer":
        """Add `variables` for the template. Raises `MalformedRequest` naming those that it does not read or take."""

    def call_beginning_ids(self, name: str | None, context_ids: Sequence[int] = ()) -> list[int]:
        """Return the beginning of a required call (of `name`), after the end of reasoning that `context_ids` begin."""

    def parse(self, output: SampledOutput, tools: Sequence[Json]) -> ParsedOutput:
        """Return the parts of an output. Without `tools` nothing is a call. Never raises."""

    def open_output(
        self, output: SampledOutput, tools: Sequence[Json], stops: Sequence[str], stop_ids: frozenset[int]
    ) -> OutputStream | None:
        """Return a reader equal to `parse` for an output being sampled, or None if the family needs whole outputs."""

    def describe(self) -> FamilyDescription:
        """Return the findings about the family."""
