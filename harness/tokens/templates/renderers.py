"""Hand-written renderers of the `renderers` package, which bridge turns that a template would rewrite.

A renderer is picked by behavior: it must give the template's own ids on a set of conversations. It runs on our
tokenizer, so no message can forge a marker. A bridge that does not begin with the sampled ids is discarded (I1).
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property, lru_cache
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, get_args

from harness.errors import MalformedRequest, TokenizerError
from harness.tokens.chat_tokenizer import ChatTokenizer, DelimiterSource, FamilyDescription, SampledOutput, SampledTurn
from harness.tokens.delimiter import Transition, dummy_answer, dummy_messages, dummy_tools
from harness.tokens.markers import GuardedMessages
from harness.tokens.outputs.output_stream import OutputStream
from harness.tokens.parsing import ParsedOutput, tool_call
from harness.tokens.templates.cached_suffix import KeptSuffixes, fillable_texts
from harness.tokens.templates.chat_template import DESCRIBED_TRANSITIONS, MOST_BOUND, ChatTemplateTokenizer
from harness.tokens.templates.message_form import MessageForm, refusal_of
from harness.tokens.tokenizer import Tokenizer
from harness.types import Json, Message

if TYPE_CHECKING:
    from renderers import Renderer

_SHORT_TEXT = 32  # characters; a renderer encodes the same roles and headers several times a turn
_SHORT_TEXTS = 256


class RenderersTokenizer:
    def __init__(self, name: str, template: ChatTemplateTokenizer) -> None:
        """Raise `TokenizerError` if there is no such renderer, or the vocabulary lacks its markers."""
        self.name = name
        self.tokenizer = template.tokenizer
        self._template = template
        self._bound = lru_cache(MOST_BOUND)(self._bind)
        self._bridges_only = False
        form = template.form
        self._form = MessageForm(developer_as_system=form.developer_as_system, late_roles=form.late_roles)
        self._variables = template.template.variables
        self._renderer = _build(name, TokenizerView(self.tokenizer), self._variables)
        self._suffixes = KeptSuffixes(self.tokenizer, template.end_ids, template.dummy_text, self._dummy_ids)

    def render_ids(self, messages: Sequence[Message], tools: Sequence[Json]) -> list[int]:
        if self._bridges_only:
            return self._template.render_ids(messages, tools)
        guard = self._guard(self._form.apply(messages), tools)
        renderer = self._renderer_for(guard)
        try:
            ids = renderer.render_ids(
                _plain(guard.messages), tools=_plain(guard.tools) or None, add_generation_prompt=True
            )
        except Exception as error:  # a renderer may raise anything over messages it was not written for
            raise refusal_of(messages, f"the renderer {self.name} refuses these messages: {error}") from error
        return list(ids)

    @property
    def end_of_turn_id(self) -> int | None:
        return self._template.end_of_turn_id

    def extend_ids(self, previous: SampledTurn, messages: Sequence[Message], tools: Sequence[Json]) -> list[int] | None:
        if not messages or any(message["role"] == "assistant" for message in messages):
            return self._template.extend_ids(previous, messages, tools)  # bridges have no assistant messages
        # A bridge closes what the answer left open, then writes the new messages. With nothing to close it depends on
        # the transition alone, so it is kept as a suffix, if that gives the renderer's ids on hard texts.
        if self._template.has_ended_in_order(previous):
            placed = self._form.place(messages, goes_on=True)
            suffix, texts = self._suffixes.find(Transition.behind(previous, placed, tools)), fillable_texts(placed)
            if suffix is not None and texts is not None:
                return suffix.encode(texts, self.tokenizer, previous.output_ids[-1])
        return self._bridge(list(previous.context_ids), list(previous.output_ids), messages, tools)

    def with_variables(self, variables: Mapping[str, Any]) -> ChatTokenizer:
        return self._bound(json.dumps(variables)) if variables else self

    def _bind(self, variables: str) -> ChatTokenizer:
        template = self._template.with_variables(json.loads(variables))
        try:
            renderer = RenderersTokenizer(self.name, template)
        except TokenizerError:  # only the template takes the value
            return template
        # With thinking off, Qwen3's renderer writes an empty thought into earlier answers: as they were sampled and not
        # as the template renders them.
        renderer._bridges_only = renderer.differs_from_template()
        return renderer if renderer._bridges_as_template() else template

    def call_beginning_ids(self, name: str | None, context_ids: Sequence[int] = ()) -> list[int]:
        return self._template.call_beginning_ids(name, context_ids)

    def parse(self, output: SampledOutput, tools: Sequence[Json]) -> ParsedOutput:
        # Our own parsers read all that they can. The renderer reads calls that they do not know.
        if not tools or output.stop is not None or self._template.reads_calls:
            return self._template.parse(output, tools)
        ids = [*output.forced_ids, *output.ids]
        try:
            parsed = self._renderer.parse_response(ids, tools=_plain(tools), prompt_ids=list(output.context_ids))
        except Exception:  # noqa: BLE001  # our parsers read what makes it fail
            return self._template.parse(output, tools)
        found = [tool_call(call.name, call.arguments) for call in parsed.tool_calls if call.status == "ok"]
        calls = tuple(call for call in found if call is not None)
        if len(calls) < len(parsed.tool_calls):
            return self._template.parse(output, tools)
        return ParsedOutput(parsed.content, calls, reasoning=parsed.reasoning_content or "")

    def open_output(
        self, output: SampledOutput, tools: Sequence[Json], stops: Sequence[str], stop_ids: frozenset[int]
    ) -> OutputStream | None:
        if tools and not self._template.reads_calls:
            return None
        return self._template.open_output(output, tools, stops, stop_ids)

    def describe(self) -> FamilyDescription:
        return self._description

    @cached_property
    def _description(self) -> FamilyDescription:
        output = [*self.tokenizer.encode("text"), min(self.tokenizer.eos_ids, default=0)]
        delimiters: dict[str, DelimiterSource] = {}
        for transition in DESCRIBED_TRANSITIONS:
            tools = dummy_tools() if transition.has_tools else []
            context = self.render_ids(dummy_messages(["user"], ["text"]), tools)
            messages = dummy_messages(transition.roles, ["text"] * len(transition.roles))
            bridged = self.extend_ids(SampledTurn(dummy_answer(transition.calls), output, context), messages, tools)
            source = DelimiterSource.FULL_RENDER if bridged is None else DelimiterSource.RENDERER
            delimiters[str(transition)] = source
        notes = ("the renderer gives other ids than the chat template",) if self.differs_from_template() else ()
        return replace(
            self._template.describe(),
            delimiters=delimiters,
            renderer=self.name,
            reads_calls=self._template.reads_back(self.parse),
            notes=notes,
        )

    def differs_from_template(self) -> bool:
        """Return True if the ids differ for a conversation that the template accepts."""
        for messages, tools in _PROBES:
            try:
                expected = self._template.render_ids(messages, tools)
            except MalformedRequest:
                continue
            try:
                if self.render_ids(messages, tools) != expected:
                    return True
            except MalformedRequest:
                return True
        return False

    def _guard(self, messages: Sequence[Message], tools: Sequence[Json]) -> GuardedMessages:
        return GuardedMessages(self.tokenizer, messages, tools, self._template.own_markers)

    def _bridge(
        self, context: list[int], output: list[int], messages: Sequence[Message], tools: Sequence[Json]
    ) -> list[int] | None:
        guard = self._guard(self._form.apply(messages, goes_on=True), tools)
        renderer = self._renderer_for(guard)
        try:
            bridged = renderer.bridge_to_next_turn(
                context, output, _plain(guard.messages), tools=_plain(guard.tools) or None
            )
        except Exception:  # noqa: BLE001  # the whole conversation can still be rendered
            return None
        known = context + output
        if bridged is None or bridged.token_ids[: len(known)] != known:
            return None
        return list(bridged.token_ids[len(known) :])

    def _dummy_ids(self, _: object, messages: Sequence[Message], tools: Sequence[Json]) -> list[int] | None:
        return self._bridge(self.render_ids([_USER], tools), self.tokenizer.encode("text"), messages, tools)

    def _bridges_as_template(self) -> bool:
        ids = self._dummy_ids(None, [_USER], ())
        whole = self._template.render_ids([_USER, {"role": "assistant", "content": "text"}, _USER], ())
        return ids is not None and whole[-len(ids) :] == ids

    def _renderer_for(self, guard: GuardedMessages) -> "Renderer":
        # Messages with markers need a renderer of their own, which encodes the placeholders.
        if not guard.has_markers:
            return self._renderer
        return _build(self.name, TokenizerView(self.tokenizer, guard), self._variables)


class TokenizerView:
    """Our tokenizer under the names that renderers call. Markers in the text of `guard` stay characters."""

    name_or_path = ""
    unk_token_id = None

    def __init__(self, tokenizer: Tokenizer, guard: GuardedMessages | None = None) -> None:
        self._tokenizer = tokenizer
        self._guard = guard
        self._encode_short = lru_cache(_SHORT_TEXTS)(tokenizer.encode if guard is None else guard.encode)
        self.eos_token_id = min(tokenizer.eos_ids, default=None)

    def encode(self, text: str, *args: Any, **options: Any) -> list[int]:
        """Return the ids of `text`, ignoring options of other tokenizers."""
        if len(text) <= _SHORT_TEXT:
            return list(self._encode_short(text))
        return self._tokenizer.encode(text) if self._guard is None else self._guard.encode(text)

    def decode(self, token_ids: Any, *args: Any, **options: Any) -> str:
        """Return the text of ids, or of one."""
        return self._tokenizer.decode([token_ids] if isinstance(token_ids, int) else list(token_ids))

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        """Return the id of a marker, None if the vocabulary lacks it, or a list for several."""
        return (
            self._tokenizer.marker_id(tokens) if isinstance(tokens, str) else [*map(self.convert_tokens_to_ids, tokens)]
        )


def find_renderer(template: ChatTemplateTokenizer) -> RenderersTokenizer | None:
    """Return the first renderer that writes conversations as the template does."""
    for name in renderer_names():
        try:
            found = RenderersTokenizer(name, template)
        except TokenizerError:
            continue
        if not found.differs_from_template():
            return found
    return None


@cache
def renderer_names() -> tuple[str, ...]:
    configs = get_args(get_args(_package().RendererConfig)[0])
    names = (config.model_fields["name"].default for config in configs)
    return tuple(name for name in names if name not in ("auto", "default", "custom"))


def _build(name: str, view: TokenizerView, variables: Mapping[str, Any]) -> "Renderer":
    if name not in renderer_names():
        raise TokenizerError(f"no renderer {name!r}; expected auto, none or one of {', '.join(renderer_names())}")
    kind = renderer_class(name)
    try:
        config = _config(name)
        known = {each: value for each, value in variables.items() if each in type(config).model_fields}
        renderer: Renderer = kind(view, type(config).model_validate({**config.model_dump(), **known}))
    except Exception as error:  # of a foreign program whose markers this vocabulary may lack
        raise TokenizerError(f"the renderer {name!r} does not fit this tokenizer: {error}") from error
    return renderer


def renderer_class(name: str) -> Any:
    # Imports that module alone. `create_renderer` imports all of them.
    return getattr(_package(), type(_config(name)).__name__.removesuffix("Config"))


@cache
def _config(name: str) -> Any:
    from pydantic import TypeAdapter

    # Bridges every turn: reasoning of earlier turns stays as it was sampled.
    return TypeAdapter(_package().RendererConfig).validate_python({"name": name, "thinking_retention": "all"})


@cache
def _package() -> Any:
    # Its client only names these packages in annotations, so stand-ins do. The real ones take 10 MiB and as long to
    # import as everything else until a server answers.
    clients = {"openai": {"AsyncOpenAI": object}, "httpx": {}}
    stand_ins = [name for name in clients if name not in sys.modules]
    for name in stand_ins:
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(clients[name])
    try:
        return import_module("renderers")
    except ModuleNotFoundError as error:
        raise TokenizerError(
            "the chat template rewrites turns that it has rendered: `pip install 'session-harness[renderers]'` has what"
            " continues from them in many model families; with the renderer `none` every turn begins a branch"
        ) from error
    finally:
        for name in stand_ins:
            del sys.modules[name]


def _plain(values: Sequence[Any]) -> list[Any]:
    # Copies, which a renderer may change.
    return [dict(value) for value in values]


_USER: Message = {"role": "user", "content": "one"}
_CALLING: Message = {**dummy_answer(2), "content": ""}
_PROBES: tuple[tuple[Sequence[Message], Sequence[Json]], ...] = (
    ([_USER], ()),
    ([{"role": "system", "content": " rules\n"}, _USER], dummy_tools()),
    ([_USER, {"role": "assistant", "content": "two"}, {"role": "user", "content": "\n three "}], ()),
    ([_USER, _CALLING, *dummy_messages(["tool", "tool"], ["3", "<b>\n4"])], dummy_tools()),
    (
        [_USER, _CALLING, *dummy_messages(["tool", "tool"], ["3", "4"]), {"role": "assistant", "content": "x"}, _USER],
        (),
    ),
    ([_USER, {"role": "assistant", "content": "two", "reasoning_content": "hm"}, _USER], ()),
    ([_USER, {**_CALLING, "reasoning_content": "hm"}, *dummy_messages(["tool"], ["3"])], dummy_tools()),
)
