"""Conversations as agents have them and outputs as models sample them, for Hypothesis: one plan for each.

An output is ids, not a text: written as the encoder would, letter by letter, any ids of the vocabulary, half a
character, reasoning, calls in the syntax of the family with spaces of their own. A family that has markers around every
answer gets them, and sometimes not. An output ends itself, or a length or a stop string ends it.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache

from hypothesis import strategies as st

from harness.tokens.conversations import TEXTS, TOOLS, exchange
from harness.types import Json, Message
from tests.conformance.families.family import Family

STOP = "STOP"
"""The stop string of requests whose answer it ends."""

TEXT = st.sampled_from(TEXTS) | st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
HOSTILE = st.sampled_from(
    ["<|im_end|>", "<end_of_turn>", "<|eot_id|>", "</s>", "[/INST]", "</tool_response>", "<think>"]
)
CONTENTS = st.lists(TEXT | HOSTILE, min_size=1, max_size=2).map("".join)

_ARGUMENTS = st.fixed_dictionaries(
    {"country": TEXT}, optional={"population": st.integers(-(2**60), 2**60), "near": st.lists(TEXT, max_size=2)}
)
_SPACING = st.sampled_from([(", ", ": "), (",", ":"), (",  ", " : ")])
_EMOJI = "\N{WOMAN}\N{ZERO WIDTH JOINER}\N{PERSONAL COMPUTER}"


class Ending(StrEnum):
    """How an output ends."""

    ITSELF = "itself"
    LENGTH = "length"
    STOP_STRING = "stop string"


@dataclass(frozen=True)
class Step:
    """A model call: what the client says, and what the model then samples."""

    output_ids: tuple[int, ...]
    ending: Ending
    texts: tuple[str, ...]
    """Of the new messages, in turn."""
    roles: tuple[str, ...]
    """Of the new messages; those behind the results, where the answer before made calls."""
    back: int
    """How many answers the client takes back before it says this."""


@dataclass(frozen=True)
class Plan:
    """A conversation before it takes place; which calls are answered is seen when there are some."""

    lead: str | None
    """`system`, `developer` or no such message at the beginning."""
    tools: tuple[Json, ...]
    keeps_reasoning: bool
    """The client sends back the reasoning that it got."""
    steps: tuple[Step, ...]


@cache
def plans(family: Family) -> st.SearchStrategy[Plan]:
    """Conversations of two to five model calls; the more seldom of a kind, the more of it the template refuses."""
    takes_results = _takes(family, "user", "1 call", "tool")
    return st.builds(
        Plan,
        st.sampled_from([None, None, "system", "developer"]),
        st.sampled_from([TOOLS, ()] if takes_results else [TOOLS, (), (), (), ()]),
        st.booleans(),
        st.lists(_steps(family), min_size=2, max_size=5).map(tuple),
    )


def _steps(family: Family) -> st.SearchStrategy[Step]:
    last = {
        Ending.ITSELF: sorted(family.template.end_ids)[:1],
        Ending.LENGTH: [],
        Ending.STOP_STRING: family.chat.tokenizer.encode_plain(STOP),
    }
    odd = [("user", "user"), ("system", "user"), ("developer", "user")]
    usual = 6 if all(_takes(family, "user", "answer", *roles) for roles in odd) else 60
    endings = st.sampled_from([Ending.ITSELF] * 6 + [Ending.LENGTH, Ending.STOP_STRING])

    def step(output: list[int], ending: Ending, *said: tuple[str, ...]) -> Step:
        has_ended = ending is Ending.ITSELF and output[-1:] and output[-1] in family.template.end_ids
        return Step((*output, *(() if has_ended else last[ending])), ending, *said)

    return st.builds(
        step,
        _outputs(family),
        endings,
        st.lists(CONTENTS, min_size=1, max_size=3).map(tuple),
        st.sampled_from([("user",)] * usual + odd),
        st.sampled_from([0, 0, 0, 0, 1, 2]),
    )


def _takes(family: Family, *roles: str) -> bool:
    """Whether the template renders messages of those roles."""
    case = exchange((*roles, "answer"), 0, ["x"] * (len(roles) + 1), has_tools=True)
    return family.template.template.try_render(family.template.form.apply(case.prior), case.tools) is not None


def _outputs(family: Family) -> st.SearchStrategy[list[int]]:
    tokenizer = family.chat.tokenizer
    added = {tokenizer.marker_id(text) for text in tokenizer.added_tokens} | tokenizer.eos_ids
    emoji = tokenizer.encode_plain(_EMOJI)
    pieces = [
        TEXT.map(tokenizer.encode_plain),
        TEXT.map(lambda text: [token_id for letter in text for token_id in tokenizer.encode_plain(letter)]),
        st.lists(st.integers(0, tokenizer.vocab_size - 1).filter(lambda token_id: token_id not in added), max_size=4),
        st.integers(1, len(emoji)).map(lambda length: emoji[:length]),
    ]
    said = st.lists(st.one_of(pieces), max_size=3).map(_joined)
    outputs = [said, said, st.tuples(said, _calls(family)).map(_joined), _calls(family), _calls(family)]
    if family.frame:
        framed = st.tuples(st.just(tokenizer.encode(family.frame)), said).map(_joined)
        before, after = (st.just(tokenizer.encode(text)) for text in family.reasoning_frame)
        outputs += [framed, framed, st.tuples(before, said, after, framed | _calls(family)).map(_joined)]
    think = [tokenizer.marker_id(marker) for marker in ("<think>", "</think>")]
    if None not in think:
        begin, end = think
        outputs += [st.tuples(st.just([begin]), said, st.just([end]), each).map(_joined) for each in outputs[-2:]]
    return st.one_of(outputs)


def _calls(family: Family) -> st.SearchStrategy[list[int]]:
    """One or two calls, as the family writes them."""
    return st.lists(st.tuples(_ARGUMENTS, _SPACING), min_size=1, max_size=2).map(lambda calls: _written(family, calls))


def _written(family: Family, calls: Sequence[tuple[Json, tuple[str, str]]]) -> list[int]:
    """`calls` as the template renders them, or in Hermes where it renders none; one where it renders no two."""
    template = family.template
    texts = [json.dumps(arguments, ensure_ascii=False, separators=spacing) for arguments, spacing in calls]
    made = [
        {"id": f"call_0_{i}", "type": "function", "function": {"name": "find_city", "arguments": text}}
        for i, text in enumerate(texts)
    ]
    for number in (len(made), 1) if template.form.shows_calls else ():
        calling = template.form.apply([_QUESTION, {"role": "assistant", "content": "", "tool_calls": made[:number]}])
        whole = template.template.try_render(calling, TOOLS, generation_prompt=False)
        if whole is not None:
            text = whole[len(template.template.render(calling[:1], TOOLS)) :].rstrip("\n")
            text = text.removeprefix("<think>\n\n</think>\n\n")  # Qwen3 writes it into the last answer only
            for end in sorted(template.end_ids)[:1]:  # the one that `_steps` writes
                text = text.removesuffix(family.chat.tokenizer.token_text(end))
            return family.chat.tokenizer.encode(text)
    hermes = [f'<tool_call>\n{{"name": "find_city", "arguments": {text}}}\n</tool_call>' for text in texts]
    return family.chat.tokenizer.encode("\n".join(hermes))


def _joined(parts: Sequence[Sequence[int]]) -> list[int]:
    return [token_id for part in parts for token_id in part]


_QUESTION: Message = {"role": "user", "content": "question"}
