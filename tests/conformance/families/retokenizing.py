"""What a pipeline that keeps messages and encodes them again would have trained on, measured.

Outputs are made the way models make them: with splits that no encoder would choose, cut at a length, with JSON spacing
of their own, with reasoning and white space. Each is parsed to a message, rendered through the template in the next
prompt, and encoded. A turn is changed when that prompt does not begin with what was really seen and sampled.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from harness.tokens.chat_tokenizer import SampledOutput
from harness.tokens.conversations import TOOLS
from harness.tokens.tokenizer import Tokenizer
from harness.types import Json, Message
from tests.conformance.families.family import Family

OUTPUTS = 100
"""Per family and kind."""
SENTENCES = (
    "The committee published its findings on 14 March 2023, three weeks late.",
    "First, install the dependencies; then run `make test` and read the output carefully.",
    "def total(prices):\n    return sum(price * 1.19 for price in prices)\n",
    "L'addition s'élève à 42,50 €, service compris.",
    "東京は日本の首都です。",
    "Unfortunately, thermodynamics disagrees: entropy increases.",
    "1. Check the logs\n2. Restart the worker\n3. Escalate",
)
_QUESTION: Message = {"role": "user", "content": "Please help me with this."}
_NEXT: Message = {"role": "user", "content": "Go on."}
_MOST_ATTEMPTS = 50


def measure(family: Family) -> dict[str, int]:
    """Return the percentage of outputs of each kind that come back with other ids, from one seed."""
    found = {kind: list(islice(_outputs(family, make, random.Random(0)), OUTPUTS)) for kind, make in KINDS.items()}
    return {
        kind: round(100 * sum(_is_changed(family, ids, tools) for ids, tools in outputs) / len(outputs))
        for kind, outputs in found.items()
        if outputs
    }


def _outputs(family: Family, make: "Maker", rng: random.Random) -> Iterator[tuple[list[int], Sequence[Json]]]:
    for _ in range(OUTPUTS + _MOST_ATTEMPTS):
        made = make(family, rng)
        if made is not None:
            yield made, TOOLS if make is _call else ()


def _is_changed(family: Family, output: Sequence[int], tools: Sequence[Json]) -> bool:
    """Return whether the next prompt does not begin with what was seen and sampled."""
    prompt = family.chat.render_ids([_QUESTION], tools)
    parsed = family.chat.parse(SampledOutput(output, prompt[-64:]), tools)
    again = family.chat.render_ids(
        [_QUESTION, _reply(parsed.content, parsed.reasoning, parsed.tool_calls), *_after(tools)], tools
    )
    known = prompt + list(output)
    return again[: len(known)] != known


def _reply(content: str, reasoning: str, calls: Sequence[object]) -> Message:
    """What an agent keeps of an answer and sends back."""
    reply: Json = {"role": "assistant", "content": content}
    if reasoning:
        reply["reasoning_content"] = reasoning
    if calls:
        made = [{"name": call.name, "arguments": call.arguments} for call in calls]  # type: ignore[attr-defined]
        reply["tool_calls"] = [
            {"id": f"call_0_{i}", "type": "function", "function": each} for i, each in enumerate(made)
        ]
    return reply


def _after(tools: Sequence[Json]) -> list[Message]:
    return [{"role": "tool", "tool_call_id": "call_0_0", "content": "Paris"}] if tools else [_NEXT]


def _text(rng: random.Random) -> str:
    return " ".join(rng.choices(SENTENCES, k=3)).strip()


def _ended(family: Family, ids: Sequence[int]) -> list[int]:
    """An answer of those words, with what the family has around them."""
    return [*family.chat.tokenizer.encode(family.frame), *ids, *sorted(family.template.end_ids)[:1]]


def _canonical(family: Family, rng: random.Random) -> list[int] | None:
    return _ended(family, family.chat.tokenizer.encode_plain(_text(rng)))


def _split_otherwise(family: Family, rng: random.Random) -> list[int] | None:
    """One token of the answer was sampled as two."""
    tokenizer = family.chat.tokenizer
    ids = tokenizer.encode_plain(_text(rng))
    for position in rng.sample(range(len(ids)), len(ids)):
        pair = _pair_for(tokenizer, ids[position], rng)
        candidate = [*ids[:position], *pair, *ids[position + 1 :]]
        if pair and tokenizer.decode(candidate) == tokenizer.decode(ids):
            return _ended(family, candidate)
    return None


def _pair_for(tokenizer: Tokenizer, token_id: int, rng: random.Random) -> list[int]:
    """Two ids that say what `token_id` says, empty when there are none."""
    text = tokenizer.decode([token_id])
    if len(text) < 3 or "\N{REPLACEMENT CHARACTER}" in text:
        return []
    at = rng.randrange(1, len(text))
    pair = tokenizer.encode_plain(text[:at]) + tokenizer.encode_plain(text[at:])
    return pair if len(pair) == 2 else []


def _cut(family: Family, rng: random.Random) -> list[int] | None:
    """The token budget ended the answer."""
    ids = family.chat.tokenizer.encode_plain(_text(rng))
    return [*family.chat.tokenizer.encode(family.frame), *ids[: rng.randrange(1, len(ids))]]


def _white_space(family: Family, rng: random.Random) -> list[int] | None:
    before, after = rng.choice([("", "\n"), (" ", ""), ("\n\n", ""), ("", "  "), ("", "\n\n")])
    return _ended(family, family.chat.tokenizer.encode_plain(before + _text(rng) + after))


def _reasoning(family: Family, rng: random.Random) -> list[int] | None:
    before, after = family.reasoning_frame if family.frame else ("<think>\n", "\n</think>\n\n")
    if not family.frame and family.chat.tokenizer.marker_id("<think>") is None:
        return None
    text = f"{before}{_text(rng)}{after}{family.frame}{rng.choice(SENTENCES).strip()}"
    return [*family.chat.tokenizer.encode(text), *sorted(family.template.end_ids)[:1]]


def _call(family: Family, rng: random.Random) -> list[int] | None:
    """A call as the template renders it, but for the spaces that JSON leaves free."""
    template = family.template
    if not template.form.shows_calls:
        return None
    arguments = f'{{"country": "France", "population": {rng.randrange(10**6)}}}'
    calling = template.form.apply([_QUESTION, {**_CALLING, "tool_calls": [_made(arguments)]}])
    prompt = template.template.render(calling[:1], TOOLS)
    text = template.template.render(calling, TOOLS, generation_prompt=False)[len(prompt) :].rstrip("\n")
    text = text.removeprefix("<think>\n\n</think>\n\n")  # Qwen3 writes it into the last answer only
    colon, comma = rng.choice([(":", ","), (":", ", "), (" : ", ", "), (": ", ","), (": ", ", ")])
    spaced = text.replace('": ', f'"{colon}').replace(', "', f'{comma}"')
    ids = family.chat.tokenizer.encode(spaced)
    return ids if family.chat.parse(SampledOutput(ids), TOOLS).tool_calls else None


def _made(arguments: str) -> Json:
    return {"id": "call_0_0", "type": "function", "function": {"name": "find_city", "arguments": arguments}}


_CALLING: Message = {"role": "assistant", "content": ""}

Maker = Callable[[Family, random.Random], list[int] | None]

KINDS: dict[str, Maker] = {
    "as an encoder writes it": _canonical,
    "one token sampled as two": _split_otherwise,
    "cut at a length": _cut,
    "white space at an edge": _white_space,
    "reasoning first": _reasoning,
    "tool call, other spacing": _call,
}
"""Ways in which models write, with what makes such an output; None when the family has none."""
