"""The seam between a model family and everything else: how it writes conversations as ids and reads outputs.

Two implementations: `ChatTemplateTokenizer` for any Jinja template, `RenderersTokenizer` for the families that the
`renderers` package knows. `tokens.model_family.open_chat_tokenizer` picks one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

from harness.tokens.outputs.output_stream import OutputStream
from harness.tokens.parsing import ParsedOutput
from harness.tokens.tokenizer import Tokenizer
from harness.types import Json, Message


class DelimiterSource(StrEnum):
    """Where the ids between two answers come from."""

    RENDERER = "renderer"
    """`bridge_to_next_turn` of a renderer of the `renderers` package."""
    CACHED_SUFFIX = "cached suffix"
    """Ids kept from the first use of the template; only the messages' texts are encoded."""
    PREFIX_TRICK = "prefix trick"
    """The template renders a dummy conversation with the new messages."""
    FULL_RENDER = "full render"
    """Nowhere: the template rewrites what was before. The session branches."""


@dataclass(frozen=True, slots=True)
class TemplateDivergence:
    """Where a template rewrites what it rendered before."""

    conversation: str
    """The roles that show it, as in `user assistant user`."""
    position: int
    """Index of the first differing token."""
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class FamilyDescription:
    """The findings about a model family when its folder was opened."""

    template_digest: str
    """SHA-256 of the chat template."""
    delimiters: Mapping[str, DelimiterSource]
    """By transition, as in `answer -> user`."""
    call_syntax: str
    """How the model writes tool calls."""
    renderer: str | None = None
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    """Those that are set."""
    divergence: TemplateDivergence | None = None
    """The first conversation in which the template is not append-only; what was sampled is kept all the same."""
    shows_tools: bool = True
    """The template tells the model which tools there are."""
    shows_calls: bool = True
    """The template renders the tool calls of earlier turns."""
    reads_calls: bool = True
    """Calls as the template writes them are read as those calls."""
    shows_late_system: bool = True
    """The template shows a system message behind others where it is said; else its text goes into a neighbor."""
    notes: Sequence[str] = field(default=())

    @property
    def faults(self) -> Sequence[str]:
        """Tools or calls that get lost, in words; an agent that has tools fails without an error of its own."""
        found = {
            "tools are not in the prompt: the template does not show them": not self.shows_tools,
            "tool calls cannot be checked: the template does not show those of earlier turns": not self.shows_calls,
            f"tool calls cannot be read: the template does not write them as {self.call_syntax}": (
                self.shows_calls and not self.reads_calls
            ),
        }
        return tuple(fault for fault, is_found in found.items() if is_found)


class SampledTurn(NamedTuple):
    """The turn that a prompt goes on from."""

    reply: Message
    output_ids: Sequence[int]
    context_ids: Sequence[int]
    """The end of the prompt that the output was sampled from; a bounded tail is enough."""
    opens_with_system: bool = False
    """The conversation begins with a system message."""
    after_tools: bool = False
    """Some tool answered before that output was sampled."""


class SampledOutput(NamedTuple):
    """An output to be read, and the ids around it."""

    ids: Sequence[int]
    context_ids: Sequence[int] = ()
    """The end of the prompt, which may have begun the reasoning."""
    forced_ids: Sequence[int] = ()
    """Ids of the prompt that belong to the answer: the beginning of a call that was asked for."""
    stop: str | None = None
    """The stop string that ended the output."""


class ChatTokenizer(Protocol):
    """Messages to prompt ids, output ids to messages; what was sampled is never encoded again (I1)."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer below, guarding the markers of the family."""

    @property
    def end_of_turn_id(self) -> int | None:
        """The id with which an answer of the family ends; None when the tokenizer declares no end."""

    def render_ids(self, messages: Sequence[Message], tools: Sequence[Json]) -> list[int]:
        """Ids of the whole prompt for the assistant's next turn.

        Raises `MalformedRequest` when the family cannot express the messages.
        """

    def extend_ids(self, previous: SampledTurn, messages: Sequence[Message], tools: Sequence[Json]) -> list[int] | None:
        """Ids between the output of `previous` and the assistant's next turn, after `messages`.

        An output that did not end itself (cut by length, by an abort, by a stop string) is closed first with the
        family's own marker. None when the family rewrites here what was before; the caller then renders a new branch.
        """

    def with_variables(self, variables: Mapping[str, Any]) -> "ChatTokenizer":
        """This family, with `variables` of its template set beside its own; kept for the next time.

        Raises `MalformedRequest` naming a variable that the template does not read.
        """

    def call_beginning_ids(self, name: str | None) -> list[int]:
        """How an answer that must be a call (of `name`) begins."""

    def parse(self, output: SampledOutput, tools: Sequence[Json]) -> ParsedOutput:
        """Content, reasoning and tool calls of an output; without `tools` nothing is a call. Never raises."""

    def open_output(
        self, output: SampledOutput, tools: Sequence[Json], stops: Sequence[str], stop_ids: frozenset[int]
    ) -> OutputStream | None:
        """A reader of an output that has begun with `output`'s context and will be sampled, as `parse` will read it.

        It may end with one of the `stops` or `stop_ids`. None where the family reads whole outputs only.
        """

    def describe(self) -> FamilyDescription:
        """The findings about the family when it was opened; for logs, records and documentation."""
