"""Test conversations for a model family: every order of roles up to a length, with hard texts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from harness.tokens.parsing import ToolCall
from harness.types import Json, Message

TEXTS = (
    "What is the capital of France?",
    "",
    " ",
    "\n",
    "  leading and trailing \n\n",
    "tab\tand\r\nline ends\n",
    "日本語 中文 한국어 ไทย",
    "\N{WOMAN}\N{ZERO WIDTH JOINER}\N{PERSONAL COMPUTER} \N{REGIONAL INDICATOR SYMBOL LETTER D}\N{GRINNING FACE}",
    '{"a": [1, 2.50, null], "b": "\\u00e9\\n"}',
    "<b>&amp;</b> {{ messages }} {% raw %} \\ ' \" ` $",
    "def f(x):\n    return x  # 12345678901234567890\n",
)
"""Message contents: Unicode, white space at the edges, the template language itself."""

LONG_TEXT = "The quick brown fox jumps over the lazy dog. 日本語 12345\n" * 2_000
"""Text of about a hundred thousand characters."""

_ANSWERS = ("The capital of France is Paris.", "日本語", "x")
_LEADS = ((), ("system",), ("developer",))
_HISTORY = (("user", "answer"), ("user", "1 call", "tool", "answer"), ("user", "2 calls", "tool", "tool", "answer"))
_HISTORIES = ((), *_HISTORY, *(first + second for first, second in product(_HISTORY, repeat=2)))
_LAST = (("user",), ("user", "1 call", "tool"), ("user", "2 calls", "tool", "tool"))
_STEPS = (
    ("answer", ("user",)),
    ("answer", ("user", "user")),
    ("answer", ("system", "user")),
    ("answer", ("developer", "user")),
    ("1 call", ("tool",)),
    ("1 call", ("tool", "user")),
    ("2 calls", ("tool", "tool")),
)

_PROPERTIES = {"country": {"type": "string"}, "population": {"type": "integer"}}
_PARAMETERS = {"type": "object", "properties": _PROPERTIES, "required": ["country"]}
_FIND_CITY = {"name": "find_city", "description": "Finds a city.", "parameters": _PARAMETERS}
TOOLS: tuple[Json, ...] = ({"type": "function", "function": _FIND_CITY},)


@dataclass(frozen=True, slots=True)
class Exchange:
    prior: tuple[Message, ...]
    reply: Message
    new: tuple[Message, ...]
    tools: tuple[Json, ...]

    @property
    def opens_with_system(self) -> bool:
        return self.prior[0]["role"] in ("system", "developer")

    @property
    def after_tools(self) -> bool:
        return any(message["role"] == "tool" for message in self.prior)

    def __str__(self) -> str:
        reply = "assistant with calls" if self.reply.get("tool_calls") else "assistant"
        roles = [*(message["role"] for message in self.prior), f"[{reply}]", *(message["role"] for message in self.new)]
        return " ".join(roles) + (" with tools" if self.tools else "")


def exchanges() -> Iterator[Exchange]:
    """Yield exchanges for all role sequences with up to two earlier rounds, cycling through `TEXTS`."""
    for number, (lead, history, last, (sampled, following)) in enumerate(product(_LEADS, _HISTORIES, _LAST, _STEPS)):
        roles = (*lead, *history, *last, sampled, *following)
        calls = any("call" in role for role in roles)
        for has_tools in (True,) if calls else (False, True):
            yield exchange(
                roles, len(following), [TEXTS[(number + i) % len(TEXTS)] for i in range(len(roles))], has_tools
            )


def exchange(roles: Sequence[str], new: int, texts: Sequence[str], has_tools: bool) -> Exchange:
    """Return the exchange with these `roles`, of which the last `new` follow the sampled answer.

    A role is one of OpenAI's, `answer`, or `N calls`. Answers and calls ignore their text.
    """
    messages: list[Message] = []
    caller = 0  # position of the last message with calls
    for position, (role, text) in enumerate(zip(roles, texts, strict=True)):
        if role == "answer":
            messages.append({"role": "assistant", "content": _ANSWERS[position % len(_ANSWERS)]})
        elif "call" in role:
            caller = position
            arguments = [f'{{"country": "France", "population":  {i + 1}}}' for i in range(int(role.split()[0]))]
            calls = [ToolCall("find_city", each).to_json(f"call_{position}_{i}") for i, each in enumerate(arguments)]
            messages.append({"role": "assistant", "content": "", "tool_calls": calls})
        elif role == "tool":
            call_id = f"call_{caller}_{position - caller - 1}"
            messages.append({"role": "tool", "content": text, "tool_call_id": call_id})
        else:
            messages.append({"role": role, "content": text})
    sampled = len(roles) - new - 1
    tools = TOOLS if has_tools else ()
    return Exchange(tuple(messages[:sampled]), messages[sampled], tuple(messages[sampled + 1 :]), tools)
