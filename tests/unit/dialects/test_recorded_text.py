"""Text that a request names in the record instead of sending it: bounded after it is put in, whatever names it."""

import json

import pytest
from msgspec import structs

from harness.dialects.dialect import Dialect
from harness.dialects.model_request import WireCall, seal
from harness.dialects.request_limits import DEFAULT_LIMITS, RequestLimits
from harness.errors import MalformedRequest, OverLimit
from harness.tokens.history import History
from harness.types import Json, Turn
from tests.builders import new_session, take_turn, user
from tests.unit.dialects.test_recalled import MESSAGES, RESPONSES, steps_of

SAID = "x" * 300
ARGUMENTS = json.dumps({"path": SAID})


def recorded(number: int) -> Turn:
    """A turn that reasoned, said and called a tool, each in some 300 characters."""
    call = {"id": f"call{number}", "type": "function", "function": {"name": "f", "arguments": f"  {ARGUMENTS}"}}
    reply = {"role": "assistant", "content": SAID, "reasoning_content": SAID, "tool_calls": [call]}
    return structs.replace(take_turn(new_session(), [user("hi")]), reply=reply)


TURNS = {f"{number:032x}": recorded(number) for number in range(100)}
IDS = list(TURNS)
CALLERS = {turn.reply["tool_calls"][0]["id"]: turn for turn in TURNS.values()}


def sealed_block(number: int) -> Json:
    """A reply of Messages that keeps the signature of its reasoning only."""
    return {"role": "assistant", "content": [{"type": "thinking", "signature": seal(IDS[number])}]}


def sealed_item(number: int) -> Json:
    """The same of Responses."""
    return {"type": "reasoning", "summary": [], "encrypted_content": seal(IDS[number])}


def use(number: int) -> Json:
    """A call of Messages, whose arguments were recorded in another spelling."""
    block = {"type": "tool_use", "id": f"call{number}", "name": "f", "input": {"path": SAID}}
    return {"role": "assistant", "content": [block]}


def refer(number: int, kind: str) -> Json:
    """A reference to an item."""
    return {"type": "item_reference", "id": f"{kind}_{IDS[number]}" + ("_0" if kind == "fc" else "")}


NAMING = {
    "seals": (MESSAGES, "messages", sealed_block),
    "calls": (MESSAGES, "messages", use),
    "encrypted": (RESPONSES, "input", sealed_item),
    "reasoning": (RESPONSES, "input", lambda number: refer(number, "rs")),
    "texts": (RESPONSES, "input", lambda number: refer(number, "msg")),
    "call items": (RESPONSES, "input", lambda number: refer(number, "fc")),
}


def parse(dialect: Dialect, content: Json, limits: RequestLimits, history: History) -> list[Json]:
    """The messages of a request to the session that recorded `TURNS`."""
    wire = WireCall(json.dumps(content).encode(), answered_as=TURNS.get, caller=CALLERS.get)
    asked = dialect.parse(wire, limits, history)
    history.read(asked.messages, asked.tools, asked.recall)
    return [dict(message) for message in asked.messages]


def between(said: list[Json]) -> list[Json]:
    """Each of these behind a user's message."""
    return [each for one in said for each in (user("continue"), one)]


@pytest.mark.parametrize("naming", NAMING)
@pytest.mark.parametrize("known", [0, 2])
def test_text_that_stands_in_the_record_counts_as_if_it_were_sent(naming: str, known: int):
    """Three hundred characters for each key: three fit into a thousand, whatever was recalled, and four do not."""
    dialect, field, name = NAMING[naming]
    history, limits = History(), RequestLimits(body_bytes=1_000)
    for count in (known, 3):
        parse(dialect, {field: [*between([name(i) for i in range(count)]), user("end")]}, limits, history)

    with pytest.raises(OverLimit, match="body_bytes") as caught:
        parse(dialect, {field: [*between([name(i) for i in range(4)]), user("end")]}, limits, history)

    assert caught.value.limit == "body_bytes"


@pytest.mark.parametrize("naming", ["seals", "encrypted"])
def test_a_reply_holds_its_reasoning_once(naming: str):
    """Clients that split a reply into several messages repeat its signature in each."""
    dialect, field, name = NAMING[naming]

    messages = parse(dialect, {field: [user("hi"), name(0), name(0), name(1)]}, DEFAULT_LIMITS, History())

    assert messages[1]["reasoning_content"] == SAID * 2


def test_a_call_that_is_there_twice_is_refused_before_it_is_read_again():
    """However often it is there."""

    def steps(count: int) -> int:
        def refused() -> None:
            reply = {"role": "assistant", "content": use(0)["content"] * count}
            with pytest.raises(MalformedRequest, match="a unique id"):
                parse(MESSAGES, {"messages": [user("hi"), reply]}, DEFAULT_LIMITS, History())

        return steps_of(refused)

    steps(2)  # the first call reads what later ones find
    assert steps(200) < 4 * steps(2)
