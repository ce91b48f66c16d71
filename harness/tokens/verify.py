"""The properties that must hold for a model family, checked over generated conversations.

A check takes one exchange and returns a mismatch, or nothing. Messages that a family refuses (a template that knows no
tools, say) are counted and prove nothing: where they are too many, the property was not seen to hold. That what was
sampled is a prefix of the next prompt (I1) is not among the properties: a family writes only what comes behind, and a
session puts the two together. The tests and `harness verify tokens` are made of these checks; nothing is loaded or
printed here.
"""

import json
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property

from harness.errors import MalformedRequest
from harness.tokens.chat_tokenizer import ChatTokenizer, SampledOutput, SampledTurn
from harness.tokens.conversations import LONG_TEXT, Exchange, exchanges
from harness.tokens.templates.chat_template import ChatTemplateTokenizer
from harness.types import Message

MOST_REFUSED = 0.1
"""Share of refused conversations up to which a check has looked."""
_FORGED_AT_ONCE = 200


class Property(StrEnum):
    """A promise about every family."""

    PROMPT = "a prompt says what the template says"
    """Ids decode to the rendered text."""
    DELIMITER = "a delimiter says what the template says there"
    """The text after the answer is the end of the longer conversation as the template renders it."""
    CLOSED = "an answer that was cut off is closed"
    """It goes on as one that ended itself does, behind the family's end marker."""
    GUARDED = "no message can forge a marker"
    """Added tokens written out in messages, every one, change no marker of the prompt."""
    TOOLS = "tools are in the prompt"
    """The model is told which there are."""
    CALLS = "tool calls are read back"
    """Calls that the template renders are parsed to the same calls."""
    READ = "any output is read"
    """Cut off, repeated or nonsense: parsing returns."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The first case in which a property does not hold."""

    conversation: str
    expected: str
    seen: str


@dataclass(frozen=True, slots=True)
class PropertyResult:
    """The result of one property over all cases."""

    checked_property: Property
    cases: int
    refused: int
    """Cases that the family refuses to render."""
    branched: int
    """Cases in which the family rewrites history, so the session branches."""
    mismatch: Mismatch | None

    @property
    def holds(self) -> bool:
        """No case contradicts it, and few were refused."""
        return self.mismatch is None and self.refused <= MOST_REFUSED * self.cases


class Branched(Exception):  # not an error: the family rewrites history here
    """There is no delimiter: the session starts a new branch."""


@dataclass(frozen=True)
class FamilyUnderTest:
    """The chat tokenizer in use, and the template that it should be true to."""

    chat: ChatTokenizer
    template: ChatTemplateTokenizer
    _prompts: dict[int, tuple[Exchange, list[int]]] = field(default_factory=dict, init=False, repr=False)
    """By the identity of an exchange, which is kept with it: most checks ask for the same prompt."""
    _unforged: deque[str] = field(default_factory=deque, init=False, repr=False)

    def hostile_words(self) -> str:
        """The next added tokens written out; all of them when this has been asked often enough."""
        tokenizer = self.chat.tokenizer
        if not self._unforged:
            self._unforged.extend(sorted(tokenizer.added_tokens.intersection(tokenizer.markers)))
        taken = [self._unforged.popleft() for _ in range(min(_FORGED_AT_ONCE, len(self._unforged)))]
        return "".join(f"{each}assistant\n" for each in taken)

    def prompt_ids(self, case: Exchange) -> list[int]:
        """The prompt that the answer of `case` was sampled after, rendered once. Raises `MalformedRequest`."""
        if id(case) not in self._prompts:
            self._prompts[id(case)] = case, self.chat.render_ids(case.prior, case.tools)
        return self._prompts[id(case)][1]

    @cached_property
    def markers(self) -> dict[int, str]:
        """The markers of the family by their ids."""
        tokenizer = self.chat.tokenizer
        return {token_id: text for text in tokenizer.markers if (token_id := tokenizer.marker_id(text)) is not None}


Check = Callable[[FamilyUnderTest, Exchange], Mismatch | None]


def verify(
    family: FamilyUnderTest, cases: Iterable[Exchange] | None = None, properties: Iterable[Property] = Property
) -> list[PropertyResult]:
    """A result for each property over `cases`, by default all generated exchanges and a few very long ones."""
    made = [*exchanges(), *exchanges_of_long_texts()] if cases is None else list(cases)
    results: list[PropertyResult] = []
    for checked in properties:
        refused = branched = 0
        for number, case in enumerate(made, start=1):
            try:
                mismatch = CHECKS[checked](family, case)
            except MalformedRequest:
                refused += 1
            except Branched:
                branched += 1
            else:
                if mismatch is not None:
                    results.append(PropertyResult(checked, number, refused, branched, mismatch))
                    break
        else:
            results.append(PropertyResult(checked, len(made), refused, branched, None))
    return results


def exchanges_of_long_texts() -> list[Exchange]:
    """A few exchanges with a very long text."""
    return [replace(case, new=_with_content(case.new, LONG_TEXT)) for case in [*exchanges()][:2]]


def check_prompt(family: FamilyUnderTest, case: Exchange) -> Mismatch | None:
    """`Property.PROMPT`."""
    text = family.template.template.render(family.template.form.apply(case.prior), case.tools)
    expected = family.chat.tokenizer.decode(family.chat.tokenizer.encode(text))
    return _compare(case, expected, family.chat.tokenizer.decode(family.prompt_ids(case)))


def check_delimiter(family: FamilyUnderTest, case: Exchange) -> Mismatch | None:
    """`Property.DELIMITER`."""
    template, tokenizer = family.template, family.chat.tokenizer
    seen = tokenizer.decode(_extension(family, case, _whole_output(family)))
    whole = template.template.render(template.form.apply([*case.prior, case.reply, *case.new]), case.tools)
    expected = tokenizer.decode(tokenizer.encode(whole))
    return None if expected.endswith(seen) else _compare(case, expected[-len(seen) :], seen)


def check_closed(family: FamilyUnderTest, case: Exchange) -> Mismatch | None:
    """`Property.CLOSED`."""
    ended = _extension(family, case, _whole_output(family))
    cut = _extension(family, case, family.chat.tokenizer.encode_plain("cut"))
    closing, rest = cut[: len(cut) - len(ended)], cut[len(cut) - len(ended) :]
    ends = family.template.end_ids  # none where the end of an answer is no marker: then it is always prompt
    is_closed = rest == ended and len(closing) == min(1, len(ends)) and ends.issuperset(closing)
    decode, answer = family.chat.tokenizer.decode, family.chat.tokenizer.encode_plain("answer")
    for end in family.chat.tokenizer.eos_ids - ends if ends else ():
        behind = _extension(family, case, [*answer, end])
        if behind != (ended[1:] if ended[0] == end else ended):
            return _compare(case, f"{decode([end])}, {decode(ended)}", decode([end, *behind]))
    return None if is_closed else _compare(case, f"an end marker and {decode(ended)!r}", repr(decode(cut)))


def check_guarded(family: FamilyUnderTest, case: Exchange) -> Mismatch | None:
    """`Property.GUARDED`: in prompts and in delimiters."""
    text = family.hostile_words()  # in every message but the assistant's
    hostile = replace(case, prior=_with_content(case.prior, text), new=_with_content(case.new, text))
    harmless = replace(case, prior=_with_content(case.prior, "word"), new=_with_content(case.new, "word"))
    expected = _markers(family, family.prompt_ids(harmless))
    seen = _markers(family, family.prompt_ids(hostile))
    if expected == seen:
        expected = _markers(family, _extension(family, harmless, _whole_output(family)))
        seen = _markers(family, _extension(family, hostile, _whole_output(family)))
    return _compare(case, " ".join(expected), " ".join(seen))


def check_tools(family: FamilyUnderTest, case: Exchange) -> Mismatch | None:
    """`Property.TOOLS`."""
    prompt = family.chat.tokenizer.decode(family.prompt_ids(case))
    hidden = [tool["function"]["name"] for tool in case.tools if tool["function"]["description"] not in prompt]
    return _compare(case, ", ".join(hidden), "") if hidden else None


def check_calls(family: FamilyUnderTest, case: Exchange) -> Mismatch | None:
    """`Property.CALLS`."""
    template = family.template
    if not case.reply.get("tool_calls"):
        return None
    if not template.form.shows_calls:
        return Mismatch(str(case), "a template that shows calls", "one that does not: reading them cannot be checked")
    prompt = template.template.render(template.form.apply(case.prior), case.tools)
    answered = template.template.render(
        template.form.apply([*case.prior, case.reply]), case.tools, generation_prompt=False
    )
    if not answered.startswith(prompt):
        raise Branched
    parsed = family.chat.parse(
        SampledOutput(family.chat.tokenizer.encode(answered[len(prompt) :].rstrip("\n"))), case.tools
    )
    expected = [
        (call["function"]["name"], json.loads(call["function"]["arguments"])) for call in case.reply["tool_calls"]
    ]
    seen = [(call.name, json.loads(call.arguments)) for call in parsed.tool_calls]
    return _compare(case, str(expected), str(seen) if parsed.tool_calls else parsed.content)


def check_read(family: FamilyUnderTest, case: Exchange) -> Mismatch | None:
    """`Property.READ`, over pieces of a prompt, which is full of markers, and repetitions of them."""
    ids = family.prompt_ids(case)
    for output in (ids, ids[: len(ids) // 2], ids[len(ids) // 2 :], ids[-3:] * 5, []):
        parsed = family.chat.parse(SampledOutput(output, ids[-8:]), case.tools)
        if parsed.malformed and parsed.tool_calls:
            return _compare(case, "a malformed output without calls", str(parsed.tool_calls))
    return None


CHECKS: dict[Property, Check] = {
    Property.PROMPT: check_prompt,
    Property.DELIMITER: check_delimiter,
    Property.CLOSED: check_closed,
    Property.GUARDED: check_guarded,
    Property.TOOLS: check_tools,
    Property.CALLS: check_calls,
    Property.READ: check_read,
}


def _extension(
    family: FamilyUnderTest, case: Exchange, output: Sequence[int], prompt: Sequence[int] | None = None
) -> list[int]:
    """The delimiter of `case`. Raises `Branched` when there is none."""
    context = family.prompt_ids(case)[-64:] if prompt is None else prompt
    ids = family.chat.extend_ids(
        SampledTurn(case.reply, output, context, case.opens_with_system, case.after_tools), case.new, case.tools
    )
    if ids is None:
        raise Branched
    return ids


def _whole_output(family: FamilyUnderTest) -> list[int]:
    """An output that ended itself with the marker that the family ends answers with."""
    tokenizer = family.chat.tokenizer
    return [*tokenizer.encode_plain("answer"), *sorted(family.template.end_ids)[:1]]


def _markers(family: FamilyUnderTest, ids: Sequence[int]) -> list[str]:
    return [family.markers[token_id] for token_id in ids if token_id in family.markers]


def _with_content(messages: Sequence[Message], text: str) -> tuple[Message, ...]:
    return tuple(message if message["role"] == "assistant" else {**message, "content": text} for message in messages)


def _compare(case: Exchange, expected: str, seen: str) -> Mismatch | None:
    """None when equal, else both from a little before the first difference."""
    if expected == seen:
        return None
    same = next(
        (i for i, (a, b) in enumerate(zip(expected, seen, strict=False)) if a != b), min(len(expected), len(seen))
    )
    begin = max(0, same - 20)
    return Mismatch(str(case), expected[begin : same + 40], seen[begin : same + 40])
