"""Any model family with a Jinja chat template: conversations to ids, one turn at a time.

Invariant (I1): what was sampled is never tokenized again. `render_ids` encodes a conversation that starts a branch;
`extend_ids` returns only what the template puts between a sampled output and the next one, from a cached suffix where
that is as good as the prefix trick (`tokens.delimiter`), else with the trick. Messages cannot forge markers
(`tokens.markers`). Does not know sessions.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Self

from harness.tokens.append_only import find_dependence, find_divergence
from harness.tokens.cached_suffix import build_suffixes, fillable_texts
from harness.tokens.chat_tokenizer import DelimiterSource, FamilyDescription, SampledOutput, SampledTurn
from harness.tokens.delimiter import PrefixTrick, Transition, dummy_answer, dummy_messages, dummy_start, dummy_tools
from harness.tokens.jinja_template import JinjaTemplate
from harness.tokens.markers import GuardedMessages
from harness.tokens.message_form import MessageForm
from harness.tokens.output_reader import OutputReader
from harness.tokens.parsing import ParsedOutput
from harness.tokens.syntaxes.choice import call_syntax_of
from harness.tokens.tokenizer import Tokenizer
from harness.types import Json, Message


class ChatTemplateTokenizer:
    """A chat template bound to its tokenizer."""

    def __init__(self, tokenizer: Tokenizer, template: JinjaTemplate) -> None:
        """Raises `TokenizerError` when the template cannot render a question and its answer."""
        self.template = template
        self.tokenizer = tokenizer.guarding(_markers_in(template, tokenizer))
        self.form = MessageForm.of(template)
        self._trick = PrefixTrick(template)
        self.end_ids = self._find_end_ids()
        """End-of-turn ids that the template writes; a model may have more, such as an end of the document."""
        self._reader = OutputReader(self.tokenizer, call_syntax_of(template.source))
        dependence = find_dependence(self._trick, self.tokenizer)
        self._depends_on_history = dependence is not None
        self.divergence = find_divergence(template, self.form, self.tokenizer) or dependence
        """Where the template is not append-only; what was sampled is kept all the same."""
        self._suffixes = build_suffixes(self.tokenizer, self._dummy_text, self._dummy_ids)

    @classmethod
    def load(cls, directory: Path, *, template_file: Path | None = None) -> Self:
        """The tokenizer and template of a HuggingFace folder; `template_file` replaces its template.

        Raises `TokenizerError` when one of them is missing or unusable.
        """
        return cls(Tokenizer.load(directory), JinjaTemplate.load(directory, template_file))

    def render_ids(self, messages: Sequence[Message], tools: Sequence[Json]) -> list[int]:
        """Ids of the whole prompt for the assistant's next turn.

        Raises `MalformedRequest` when the template refuses the messages.
        """
        guard = self._guard(messages, tools)
        return guard.encode(self.template.render(guard.messages, guard.tools))

    def extend_ids(self, previous: SampledTurn, messages: Sequence[Message], tools: Sequence[Json]) -> list[int] | None:
        """Ids between the output of `previous` and the assistant's next turn, after `messages`; None to branch."""
        if self._depends_on_history:
            return None
        has_ended = self._has_ended(previous.output_ids)
        transition = Transition(
            previous.opens_with_system,
            previous.after_tools,
            len(previous.reply.get("tool_calls") or ()),
            tuple(message["role"] for message in messages),
            bool(tools),
        )
        suffix, texts = self._suffixes.get(transition), fillable_texts(messages)
        if suffix is not None and texts is not None:
            return suffix.encode(texts, self.tokenizer, has_ended=has_ended)
        return self._by_trick(transition, previous.reply, messages, tools, has_ended)

    def call_beginning_ids(self, name: str | None) -> list[int]:
        """How an answer that must be a call (of `name`) begins."""
        return self._reader.call_beginning_ids(name)

    def parse(self, output: SampledOutput, tools: Sequence[Json]) -> ParsedOutput:
        """Content, reasoning and tool calls of an output."""
        return self._reader.read(output, tools)

    def describe(self) -> FamilyDescription:
        """What was found out when the template was loaded."""
        return FamilyDescription(
            template_digest=self.template.digest,
            delimiters={str(transition): self._source(transition) for transition in DESCRIBED_TRANSITIONS},
            call_syntax=self._reader.syntax.name,
            divergence=self.divergence,
            shows_tools=self.form.shows_tools,
            shows_calls=self.form.shows_calls,
        )

    def _guard(self, messages: Sequence[Message], tools: Sequence[Json]) -> GuardedMessages:
        return GuardedMessages(self.tokenizer, self.form.apply(messages), tools)

    def _by_trick(
        self,
        transition: Transition,
        reply: Message,
        messages: Sequence[Message],
        tools: Sequence[Json],
        has_ended: bool,
    ) -> list[int] | None:
        guard = self._guard(messages, tools)
        *start, answer = self.form.apply([*dummy_start(transition), {**reply, "content": ""}])
        text = self._trick.find(start, answer, guard.messages, guard.tools)
        if text is None:
            return None
        return guard.encode(self._without_end_marker(text) if has_ended else text)

    def _has_ended(self, output_ids: Sequence[int]) -> bool:
        """The output ended itself, with a marker that the template ends answers with."""
        return bool(output_ids) and output_ids[-1] in self.end_ids

    def _find_end_ids(self) -> frozenset[int]:
        texts = {token_id: self.tokenizer.token_text(token_id) for token_id in self.tokenizer.eos_ids}
        written = self.template.source + self._trick.close_text
        return frozenset(token_id for token_id, text in texts.items() if text in written)

    def _without_end_marker(self, text: str) -> str:
        """`text` without the marker that an answer which has ended has already; whichever of them it was."""
        ends = [self.tokenizer.token_text(token_id) for token_id in self.end_ids]
        return text.removeprefix(next((end for end in ends if text.startswith(end)), ""))

    def _dummy_text(self, transition: Transition, messages: Sequence[Message], tools: Sequence[Json]) -> str | None:
        *start, answer = self.form.apply([*dummy_start(transition), dummy_answer(transition.calls)])
        return self._trick.find(start, answer, self.form.apply(messages), tools)

    def _dummy_ids(
        self, transition: Transition, messages: Sequence[Message], tools: Sequence[Json]
    ) -> list[int] | None:
        return self._by_trick(transition, dummy_answer(transition.calls), messages, tools, has_ended=False)

    def _source(self, transition: Transition) -> DelimiterSource:
        if self._depends_on_history:
            return DelimiterSource.FULL_RENDER
        if transition in self._suffixes:
            return DelimiterSource.CACHED_SUFFIX
        messages = dummy_messages(transition.roles, ["text"] * len(transition.roles))
        found = self._dummy_text(transition, messages, dummy_tools() if transition.has_tools else ())
        return DelimiterSource.FULL_RENDER if found is None else DelimiterSource.PREFIX_TRICK


def _markers_in(template: JinjaTemplate, tokenizer: Tokenizer) -> set[str]:
    """Added tokens that the template is built from; white space is nobody's marker."""
    return {text for text in tokenizer.added_tokens if text.strip() and text in template.source}


DESCRIBED_TRANSITIONS = tuple(
    Transition(opens_with_system=system, after_tools=False, calls=calls, roles=roles, has_tools=tools)
    for system, calls, roles, tools in (
        (False, 0, ("user",), False),
        (True, 0, ("user",), False),
        (False, 0, ("user",), True),
        (False, 1, ("tool",), True),
        (False, 2, ("tool", "tool"), True),
        (False, 0, ("system", "user"), False),
        (False, 0, ("developer", "user"), False),
    )
)
"""Those that are told to a reader."""
