"""Chat tokenizer of any model family with a Jinja chat template.

Invariant (I1): sampled ids are never tokenized again. `render_ids` encodes a conversation that starts a branch.
`extend_ids` returns only the ids between a sampled output and the next one, from a cached suffix or with the prefix
trick. Does not know sessions.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import chain
from os.path import commonprefix
from pathlib import Path
from typing import Any, Self

from harness.errors import MalformedRequest, TokenizerError
from harness.tokens.chat_tokenizer import DelimiterSource, FamilyDescription, SampledOutput, SampledTurn
from harness.tokens.delimiter import PrefixTrick, Transition, dummy_answer, dummy_messages, dummy_start, dummy_tools
from harness.tokens.markers import GuardedMessages
from harness.tokens.output_reader import OutputReader, Unread, call_syntax_of
from harness.tokens.outputs.output_stream import OutputStream
from harness.tokens.outputs.reasoning import REASONING_MARKERS, TEMPLATE_ANSWERS
from harness.tokens.parsing import CallSyntax, ParsedOutput, ToolCall
from harness.tokens.syntaxes.marked_calls import HERMES
from harness.tokens.templates.append_only import find_dependence, find_divergence
from harness.tokens.templates.cached_suffix import KeptSuffixes, fillable_texts
from harness.tokens.templates.jinja_template import JinjaTemplate
from harness.tokens.templates.message_form import MessageForm, refusal_of
from harness.tokens.tokenizer import Tokenizer
from harness.types import Json, Message

MOST_BOUND = 32
"""Sets of variables kept per family."""
_WHITE_SPACE = " \t\r\n\N{LOWER ONE EIGHTH BLOCK}"
"""White space, the last as SentencePiece vocabularies write it."""
_CALLS = tuple(ToolCall("find", text) for text in ('{"find": "<1> \\"x\\"", "count": 5}', "{}"))
_OPTIONAL = {"anyOf": [{"type": "integer"}, {"type": "null"}]}
_PARAMETERS = {"type": "object", "properties": {"find": {"type": "string"}, "count": _OPTIONAL}}
_FINDING: Json = {"type": "function", "function": {"name": "find", "description": "Finds.", "parameters": _PARAMETERS}}
_ASKING: Message = {"role": "user", "content": "question"}
_CALLING: tuple[Message, ...] = tuple(
    {"role": "assistant", "content": "", "tool_calls": [_CALLS[i].to_json(f"call_0_{i}") for i in range(calls)]}
    for calls in (2, 1)  # some templates refuse more than one call in an answer, or write the first
)
_ANSWERING: Message = {"role": "assistant", "content": "reply"}
_REASONING = {"reasoning_content": "musing", "reasoning": "musing"}
_WORD = re.compile(r"\w")
_MARKER = re.compile(r"<[^<>\n]+>|\[[A-Z_]+\]")
_AROUND_REASONING = re.compile(r"(<[^<>\s]+>)\s*musing\s*(<[^<>\s]+>)")


class ChatTemplateTokenizer:
    """Chat template bound to its tokenizer."""

    def __init__(self, tokenizer: Tokenizer, template: JinjaTemplate) -> None:
        """Raise `TokenizerError` if the template cannot render a question and its answer."""
        self.template = template
        # Every added token is a marker, special or not, in the template or not. Runs of white space are text.
        self.tokenizer = tokenizer.guarding({text for text in tokenizer.added_tokens if text.strip(_WHITE_SPACE)})
        self.form = MessageForm.of(template)
        self._trick = PrefixTrick(template)
        self._bound = lru_cache(MOST_BOUND)(self._bind)
        self.end_ids = self._find_ends()
        """Ids that the template writes after answers. A model may also end them with others."""
        self._reader = self._open_reader(syntax := call_syntax_of(self._written_calls()[1], template.text))
        known = () if syntax is HERMES else syntax.markers  # Hermes is the default for an unknown syntax, too
        begin = self._call_marker() if self.form.shows_calls and not self.reads_calls else None
        if begin is not None and begin not in known:
            self._reader = self._open_reader(Unread(begin))
        dependence = find_dependence(self._trick, self.tokenizer)
        self._depends_on_history = dependence is not None
        self.divergence = find_divergence(template, self.form, self.tokenizer) or dependence
        self._suffixes = KeptSuffixes(self.tokenizer, self.end_ids, self.dummy_text, self._dummy_ids)

    @property
    def own_markers(self) -> Collection[str]:
        return self._reader.own_markers

    @property
    def end_of_turn_id(self) -> int | None:
        return min(self.end_ids or self.tokenizer.eos_ids, default=None)

    @classmethod
    def load(cls, directory: Path, *, template_file: Path | None = None) -> Self:
        """Load a HuggingFace folder. `template_file` replaces its template. Raises `TokenizerError`."""
        return cls(Tokenizer.load(directory), JinjaTemplate.load(directory, template_file))

    def render_ids(self, messages: Sequence[Message], tools: Sequence[Json]) -> list[int]:
        guard = GuardedMessages(self.tokenizer, self.form.apply(messages), tools, self.own_markers)
        try:
            return guard.encode(self.template.render(guard.messages, guard.tools))
        except MalformedRequest as error:
            raise refusal_of(messages, error.message) from error

    def extend_ids(self, previous: SampledTurn, messages: Sequence[Message], tools: Sequence[Json]) -> list[int] | None:
        if self._depends_on_history:
            return None
        messages = self.form.place(messages, goes_on=True)
        last = previous.output_ids[-1] if previous.output_ids else None
        end = last if last in self.tokenizer.eos_ids else None  # with any of them, the template must write none
        transition = Transition.behind(previous, messages, tools)
        suffix, texts = self._suffixes.find(transition), fillable_texts(messages)
        if suffix is not None and texts is not None:
            return suffix.encode(texts, self.tokenizer, end)
        return self._by_trick(transition, previous.reply, messages, tools, end)

    def has_ended_in_order(self, previous: SampledTurn) -> bool:
        """Return True if the answer ended with a marker of the template and closed all its other markers."""
        *said, last = previous.output_ids or (None,)
        return last in self.end_ids and self._reader.is_plain(previous.context_ids, said)

    def with_variables(self, variables: Mapping[str, Any]) -> "ChatTemplateTokenizer":
        return self._bound(json.dumps(variables)) if variables else self

    def _bind(self, variables: str) -> "ChatTemplateTokenizer":
        bound = json.loads(variables)
        template = self.template.with_variables(bound)
        try:
            template.render(self.form.apply([_ASKING]))
            return ChatTemplateTokenizer(self.tokenizer, template)
        except (MalformedRequest, TokenizerError) as error:
            named = f"template variables {', '.join(bound)}"
            raise MalformedRequest(f"{named}: {error.message}", param="template_variables") from error

    def _open_reader(self, syntax: CallSyntax) -> OutputReader:
        asked, plain = self._written(_ANSWERING)
        answers: dict[str, str] = {}
        for begin, end in TEMPLATE_ANSWERS.items():  # a template asks for them, or writes them, or takes them out
            kept = self._written({**_ANSWERING, "content": f"<think>musing</think>{begin}reply{end}"})[1]
            if begin + end in asked or begin in plain or ("reply" in kept and begin not in kept):
                answers[begin] = end
        reader = OutputReader(self.tokenizer, syntax, self.template.text, answers=answers)
        if not (unread := self.unread_reasoning(reader.read)):
            return reader
        found = _AROUND_REASONING.search(unread)
        pairs = [*REASONING_MARKERS, *([(found.group(1), found.group(2))] if found else [])]
        others = (OutputReader(self.tokenizer, syntax, reasoning=pair, answers=answers) for pair in pairs)
        said = SampledOutput(self.tokenizer.encode(plain), self.tokenizer.encode(asked))
        fit = (each for each in others if not self.unread_reasoning(each.read) and not each.read(said, ()).reasoning)
        return next(fit, reader)

    def unread_reasoning(self, parse: Callable[[SampledOutput, Sequence[Json]], ParsedOutput]) -> str:
        """Return an answer with reasoning, as the template writes it, if `parse` does not find its parts."""
        encode, asked = self.tokenizer.encode, self.template.try_render(self.form.apply([_ASKING])) or ""
        for said, tools in ((_ANSWERING, []), (_CALLING[1], [_FINDING])):
            prompt, written = self._written({**said, **_REASONING}, tools)
            if "musing" not in written:
                continue
            read = [parse(SampledOutput(encode(written), encode(begin)), ()) for begin in (prompt, asked)]
            thoughts = [one.reasoning.strip() for one in read if one.content.lstrip().startswith(said["content"])]
            return "" if "musing" in thoughts else prompt.rpartition(_ASKING["content"])[2] + written
        return ""

    @cached_property
    def reads_calls(self) -> bool:
        return self.reads_back(self._reader.read)

    def reads_back(self, parse: Callable[[SampledOutput, Sequence[Json]], ParsedOutput]) -> bool:
        """Return True if `parse` finds the calls that the template writes."""
        prompt, written, calls = self._written_calls()
        output = SampledOutput(self.tokenizer.encode(written.rstrip()), self.tokenizer.encode(prompt))
        expected, found = (
            [(call.name, json.loads(call.arguments)) for call in each]  # some templates sort arguments
            for each in (_CALLS[:calls], parse(output, [_FINDING]).tool_calls)
        )
        return calls > 0 and found == expected

    def _written_calls(self) -> tuple[str, str, int]:
        two, one = (self._written(calling, [_FINDING]) for calling in _CALLING)
        written = one if two == one or not two[1] else two
        return *written, (1 if written == one else 2) if written[1] else 0

    def _written(self, answer: Message, tools: Sequence[Json] = ()) -> tuple[str, str]:
        """Return a prompt and its `answer` as the template writes them, the latter empty if it refuses."""
        prompt = self.template.try_render(self.form.apply([_ASKING]), tools) or ""
        whole = self.template.try_render(self.form.apply([_ASKING, answer]), tools, generation_prompt=False)
        if whole is None:
            return prompt, ""
        begin = commonprefix([prompt, whole])  # noqa: RUF071  # of characters
        if begin != prompt:  # some prompts begin reasoning that the answer lacks
            begin = begin[: max(begin.rfind(end) for end in ("\n", ">", "]")) + 1]
        return begin, whole.removeprefix(begin)

    def _call_marker(self) -> str | None:
        said = self.template.try_render([_ASKING, dummy_answer(0)], [_FINDING], generation_prompt=False) or ""
        plain = said.rpartition(_ASKING["content"])[2]
        written, name = self._written_calls()[1], _CALLS[0].name
        before = written.partition(name)[0]
        last = max((match.start() for match in _MARKER.finditer(before)), default=0)
        # A marker may hold the name. Where other answers have all of them, the text up to the name tells calls.
        found = [*(match.group().partition(name)[0] for match in _MARKER.finditer(written)), before[last:]]
        known = [plain, *chain(*REASONING_MARKERS), *(call.arguments for call in _CALLS)]
        return next((text for text in found if _WORD.search(text) and not any(text in each for each in known)), None)

    def call_beginning_ids(self, name: str | None, context_ids: Sequence[int] = ()) -> list[int]:
        return self._reader.call_beginning_ids(name, context_ids)

    def parse(self, output: SampledOutput, tools: Sequence[Json]) -> ParsedOutput:
        return self._reader.read(output, tools)

    def open_output(
        self, output: SampledOutput, tools: Sequence[Json], stops: Sequence[str], stop_ids: frozenset[int]
    ) -> OutputStream | None:
        return self._reader.open(output, tools, stops, stop_ids)

    def describe(self) -> FamilyDescription:
        return self._description

    @cached_property
    def _description(self) -> FamilyDescription:
        delimiters: dict[str, DelimiterSource] = {}
        for transition in DESCRIBED_TRANSITIONS:
            messages = self.form.place(dummy_messages(transition.roles, ["text"] * len(transition.roles)), goes_on=True)
            tools = dummy_tools() if transition.has_tools else ()
            if self._depends_on_history:
                source = DelimiterSource.FULL_RENDER
            elif self._suffixes.find(transition) is not None:
                source = DelimiterSource.CACHED_SUFFIX
            elif self.dummy_text(transition, messages, tools) is None:
                source = DelimiterSource.FULL_RENDER
            else:
                source = DelimiterSource.PREFIX_TRICK
            delimiters[str(transition)] = source
        return FamilyDescription(
            template_digest=self.template.digest,
            delimiters=delimiters,
            call_syntax=self._reader.syntax.name,
            template_variables=self.template.variables,
            divergence=self.divergence,
            shows_tools=self.form.shows_tools,
            shows_calls=self.form.shows_calls,
            reads_calls=self.reads_calls,
            unread_reasoning=self.unread_reasoning(self._reader.read),
            shows_late_system="system" in self.form.late_roles,
        )

    def _by_trick(
        self,
        transition: Transition,
        reply: Message,
        messages: Sequence[Message],
        tools: Sequence[Json],
        end: int | None,
    ) -> list[int] | None:
        guard = GuardedMessages(self.tokenizer, self.form.apply(messages, goes_on=True), tools, self.own_markers)
        *start, answer = self.form.apply([*dummy_start(transition), {**reply, "content": ""}])
        text = self._trick.find(start, answer, guard.messages, guard.tools)
        if text is None:
            return None
        if end is not None:
            ends = [*map(self.tokenizer.token_text, (end, *self.end_ids)), self._closing]
            text = text.removeprefix(next((each for each in ends if text.startswith(each)), ""))
        return guard.encode(text)

    @cached_property
    def _closing(self) -> str:
        """White space and markers by which the template ends an answer."""
        text = (
            self.dummy_text(Transition(False, False, 0, ("user",), False), dummy_messages(["user"], ["text"]), ()) or ""
        )
        ends = [end for end in map(self.tokenizer.token_text, self.end_ids) if end in text]
        closing = text[: min((text.index(end) + len(end) for end in ends), default=0)]
        return "" if self.tokenizer.marker_pattern.sub("", closing).strip() else closing

    def dummy_text(self, transition: Transition, messages: Sequence[Message], tools: Sequence[Json]) -> str | None:
        """Return the text between a dummy answer and the next one."""
        *start, answer = self.form.apply([*dummy_start(transition), dummy_answer(transition.calls)])
        return self._trick.find(start, answer, self.form.apply(messages, goes_on=True), tools)

    def _dummy_ids(
        self, transition: Transition, messages: Sequence[Message], tools: Sequence[Json]
    ) -> list[int] | None:
        return self._by_trick(transition, dummy_answer(transition.calls, "seek"), messages, tools, end=None)

    def _find_ends(self) -> frozenset[int]:
        ends = {self.tokenizer.token_text(each): each for each in self.tokenizer.eos_ids}
        begins: list[set[str]] = []
        for calls, role in ((0, "user"), (1, "tool")):
            transition = Transition(False, False, calls, (role,), False)
            text = self.dummy_text(transition, dummy_messages([role], ["text"]), ()) or ""
            behind = text.removeprefix(self._trick.close_text)
            begins.append({end for end in ends if behind.startswith(end)})
        # A model that continues to the next role may end with its marker, as GLM does. Such a marker begins messages of
        # one role only, and is no end that the template writes after answers.
        written = self.template.text + self._trick.close_text
        return frozenset(ends[end] for end in ends.keys() - (begins[0] ^ begins[1]) if end in written)


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
