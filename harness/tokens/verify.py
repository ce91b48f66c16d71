"""Properties that must hold for a model family, checked over generated conversations.

Conversations that a family refuses prove nothing. I1 is not checked here: a family writes only the ids after an output,
and a session joins them.
"""

import json
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from os.path import commonprefix

from harness.errors import MalformedRequest
from harness.tokens.chat_tokenizer import ChatTokenizer, SampledOutput, SampledTurn
from harness.tokens.conversations import LONG_TEXT, Exchange, exchanges
from harness.tokens.templates.chat_template import ChatTemplateTokenizer
from harness.types import Message

MOST_REFUSED = 0.1
"""Share of refused conversations up to which a property can hold."""
_FORGED_AT_ONCE = 16
_CASES_FOR_ALL = 50  # within which every added token is forged once, however many there are


class Property(StrEnum):
    PROMPT = "a prompt says what the template says"
    DELIMITER = "a delimiter says what the template says there"
    """Text that ends the longer conversation as rendered."""
    CLOSED = "an answer that was cut off is closed"
    """After the family's end marker it continues like one that ended itself."""
    GUARDED = "no message can forge a marker"
    """Added tokens in messages change no marker of the prompt."""
    TOOLS = "tools are in the prompt"
    CALLS = "tool calls are read back"
    READ = "any output is read"


@dataclass(frozen=True, slots=True)
class Mismatch:
    conversation: str
    expected: str
    seen: str


@dataclass(frozen=True, slots=True)
class PropertyResult:
    checked_property: Property
    cases: int
    refused: int
    branched: int
    """Cases in which the family rewrites history."""
    mismatch: Mismatch | None

    @property
    def holds(self) -> bool:
        return self.mismatch is None and self.refused <= MOST_REFUSED * self.cases


class Branched(Exception):  # not an error: the family rewrites history here
    """Absence of a delimiter: the session starts a new branch."""


@dataclass(frozen=True)
class FamilyUnderTest:
    """Chat tokenizer, and the template it must agree with."""

    chat: ChatTokenizer
    template: ChatTemplateTokenizer
    # By the id of an exchange, which is kept with it so that the id stays its own. Most checks need the same prompt.
    _prompts: dict[int, tuple[Exchange, list[int]]] = field(default_factory=dict, init=False, repr=False)
    _unforged: deque[str] = field(default_factory=deque, init=False, repr=False)

    def hostile_words(self) -> str:
        """Return the next added tokens as text. Enough calls cover all of them."""
        tokenizer = self.chat.tokenizer
        if not self._unforged:
            self._unforged.extend(sorted(tokenizer.added_tokens.intersection(tokenizer.markers)))
        count = max(_FORGED_AT_ONCE, -(-len(tokenizer.added_tokens) // _CASES_FOR_ALL))
        taken = [self._unforged.popleft() for _ in range(min(count, len(self._unforged)))]
        return "".join(f"{each}assistant\n" for each in taken)

    def prompt_ids(self, case: Exchange) -> list[int]:
        """Return the prompt before the answer, rendered once. Raises `MalformedRequest`."""
        if id(case) not in self._prompts:
            self._prompts[id(case)] = case, self.chat.render_ids(case.prior, case.tools)
        return self._prompts[id(case)][1]

    @cached_property
    def markers(self) -> dict[int, str]:
        tokenizer = self.chat.tokenizer
        return {token_id: text for text in tokenizer.markers if (token_id := tokenizer.marker_id(text)) is not None}


Check = Callable[[FamilyUnderTest, Exchange], Mismatch | None]


def verify(
    family: FamilyUnderTest, cases: Iterable[Exchange] | None = None, properties: Iterable[Property] = Property
) -> list[PropertyResult]:
    """Return a result for each property, by default over all generated exchanges and a few very long ones."""
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
    return [replace(case, new=_with_content(case.new, LONG_TEXT)) for case in [*exchanges()][:2]]


def check_prompt(family: FamilyUnderTest, case: Exchange) -> Mismatch | None:
    text = family.template.template.render(family.template.form.apply(case.prior), case.tools)
    expected = family.chat.tokenizer.decode(family.chat.tokenizer.encode(text))
    return _compare(case, expected, family.chat.tokenizer.decode(family.prompt_ids(case)))


def check_delimiter(family: FamilyUnderTest, case: Exchange) -> Mismatch | None:
    template, tokenizer = family.template, family.chat.tokenizer
    seen = tokenizer.decode(_extension(family, case, _whole_output(family)))
    whole = template.template.render(template.form.apply([*case.prior, case.reply, *case.new]), case.tools)
    expected = tokenizer.decode(tokenizer.encode(whole))
    return None if expected.endswith(seen) else _compare(case, expected[-len(seen) :], seen)


def check_closed(family: FamilyUnderTest, case: Exchange) -> Mismatch | None:
    ended = _extension(family, case, _whole_output(family))
    cut = _extension(family, case, family.chat.tokenizer.encode_plain("cut"))
    closing, rest = cut[: len(cut) - len(ended)], cut[len(cut) - len(ended) :]
    ends = family.template.end_ids  # empty if no marker ends an answer: the end is then always prompt
    tokenizer, closing_ids = family.chat.tokenizer, ends.intersection(closing[-1:])
    other_text = tokenizer.marker_pattern.sub("", tokenizer.decode(closing)).strip()
    is_closed = rest == ended and bool(closing) == bool(closing_ids) == bool(ends) and not other_text
    decode, answer = tokenizer.decode, tokenizer.encode_plain("answer")
    for end in tokenizer.eos_ids - ends if ends else ():
        behind = _extension(family, case, [*answer, end])
        if behind != (ended[1:] if ended[0] == end else ended):
            return _compare(case, f"{decode([end])}, {decode(ended)}", decode([end, *behind]))
    return None if is_closed else _compare(case, f"an end marker and {decode(ended)!r}", repr(decode(cut)))


def check_guarded(family: FamilyUnderTest, case: Exchange) -> Mismatch | None:
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
    prompt = family.chat.tokenizer.decode(family.prompt_ids(case))
    hidden = [tool["function"]["name"] for tool in case.tools if tool["function"]["description"] not in prompt]
    return _compare(case, ", ".join(hidden), "") if hidden else None


def check_calls(family: FamilyUnderTest, case: Exchange) -> Mismatch | None:
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
    """Check `Property.READ` over pieces of a prompt and repetitions of them."""
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


def _extension(family: FamilyUnderTest, case: Exchange, output: Sequence[int]) -> list[int]:
    context = family.prompt_ids(case)[-64:]
    ids = family.chat.extend_ids(
        SampledTurn(case.reply, output, context, case.opens_with_system, case.after_tools), case.new, case.tools
    )
    if ids is None:
        raise Branched
    return ids


def _whole_output(family: FamilyUnderTest) -> list[int]:
    tokenizer = family.chat.tokenizer
    return [*tokenizer.encode_plain("answer"), *sorted(family.template.end_ids)[:1]]


def _markers(family: FamilyUnderTest, ids: Sequence[int]) -> list[str]:
    return [family.markers[token_id] for token_id in ids if token_id in family.markers]


def _with_content(messages: Sequence[Message], text: str) -> tuple[Message, ...]:
    return tuple(message if message["role"] == "assistant" else {**message, "content": text} for message in messages)


def _compare(case: Exchange, expected: str, seen: str) -> Mismatch | None:
    if expected == seen:
        return None
    same = len(commonprefix([expected, seen]))  # noqa: RUF071  # of characters
    begin = max(0, same - 20)
    return Mismatch(str(case), expected[begin : same + 40], seen[begin : same + 40])
