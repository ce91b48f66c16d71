"""What may differ in a history that a client sends back, and what a branch says about why it is one."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import MalformedRequest
from harness.sessions.divergence import Divergence, find_divergence, find_other_tools
from harness.tokens.matching import STRICT, Matching, next_key, normal_form, same_arguments


def call(arguments: str, **extra: Any) -> dict[str, Any]:
    """An assistant message with one tool call."""
    function = {"name": "f", "arguments": arguments}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "c", "type": "function", "function": function}],
    } | extra


OURS, OTHER, THIRD = (f"call_ac53afc866cd0_{number}" for number in range(3))


def calls(*ids: str, arguments: str = "{}", **extra: Any) -> dict[str, Any]:
    """An assistant message with calls of those ids."""
    [one] = call(arguments)["tool_calls"]
    return call(arguments, **extra) | {"tool_calls": [{**one, "id": each} for each in ids]}


def same(left: dict[str, Any], right: dict[str, Any], *matching: str) -> bool:
    """Whether the two messages have the same key under that matching."""
    form = normal_form(matching)
    return next_key(b"", left, form) == next_key(b"", right, form)


@pytest.mark.parametrize(
    ("ours", "theirs", "is_same"),
    [
        ('{"a": 1, "b": 2}', '{"b":2,"a":1}', True),
        ("", "{}", True),
        ('{"a": 1}', '{"a": true}', False),
        ('{"a": 1}', '{"a": 1.0}', False),
        ('{"a": "1"}', '{"a": 1}', False),
        ('{"a": 1, "a": 2}', '{"a": 2}', False),
        ('{"a": NaN}', '{"a":NaN}', False),
        ('{"a": 1e999}', '{"a": null}', False),
        ('{"a": 1e999}', '{"a": -1e999}', False),
        (r'{"a": "\ud83d"}', r'{"a": "\ud83d"}', True),
        (r'{"a": "\ud83d"}', r'{"a":"\ud83d"}', False),
        ("not json", "not json", True),
        ("not json", "not  json", False),
    ],
)
def test_loose_tool_calls_compares_arguments_as_typed_json(ours: str, theirs: str, is_same: bool) -> None:
    """Key order and white space do not count; types and repeated keys do, and so does what no other parser reads."""
    assert same(call(ours), call(theirs), Matching.LOOSE_TOOL_CALLS) is is_same


@pytest.mark.parametrize("matching", [Matching.LOOSE_TOOL_CALLS, Matching.JSON_NUMBERS])
@pytest.mark.parametrize("value", ['"\\ud83d"', "1e999", '{"\\ud83d": 1}', "1" * 400])
def test_arguments_that_cannot_be_written_again_are_compared_as_text(matching: Matching, value: str) -> None:
    """Half a surrogate pair, and numbers beyond those of other parsers."""
    assert same(call(f'{{"a": {value}}}'), call(f'{{"a": {value}}}'), matching)
    assert not same(call(f'{{"a": {value}}}'), call('{"a": null}'), matching)
    assert same_arguments(f'{{"a": {value}}}', f'{{"a": {value}}}')
    assert not same_arguments(f'{{"a": {value}}}', '{"a": null}')


def test_strict_compares_arguments_as_text() -> None:
    """A client that re-serializes arguments branches unless its session is loose."""
    assert not same(call('{"a": 1}'), call('{"a":1}'))
    assert same(call('{"a": 1}'), call('{"a": 1}'))


def test_ignore_reasoning_lets_a_client_drop_it() -> None:
    """Clients that never learned `reasoning_content` stay on their branch."""
    thought = {"role": "assistant", "content": "x", "reasoning_content": "hm"}
    assert same(thought, {"role": "assistant", "content": "x"}, Matching.IGNORE_REASONING)
    assert not same(thought, {"role": "assistant", "content": "x"})
    assert not same(thought, {"role": "assistant", "content": "y"}, Matching.IGNORE_REASONING)


@pytest.mark.parametrize("sent", ['{"a": 1, "b": 1000}', '{"b": 1e3, "a": 1.0}', '{"a":1.0,"b":1000.0}'])
def test_numbers_may_be_spelled_as_in_javascript(sent: str) -> None:
    """Which knows one kind of them; `true` is none."""
    ours = call('{"a": 1, "b": 1000}')
    assert same(ours, call(sent), Matching.JSON_NUMBERS)
    assert same(ours, call(sent), Matching.LOOSE_TOOL_CALLS, Matching.JSON_NUMBERS)
    assert not same(call('{"a": 1}'), call('{"a": true}'), Matching.JSON_NUMBERS)
    assert not same(call('{"a": 1}'), call('{"a": "1"}'), Matching.JSON_NUMBERS)


def test_white_space_at_the_ends_of_texts_may_be_lost() -> None:
    """Not that inside of them, and not a whole text."""
    ours = {"role": "assistant", "content": " a b\n", "reasoning_content": "\n"}
    assert same(ours, {"role": "assistant", "content": "a b"}, Matching.TRIMMED)
    assert not same(ours, {"role": "assistant", "content": "a  b"}, Matching.TRIMMED)
    assert not same(ours, {"role": "assistant", "content": ""}, Matching.TRIMMED)


def test_a_message_may_be_known_by_the_ids_of_its_calls() -> None:
    """Whatever else a client has made of it; another id is another message."""
    ours = calls(OURS, arguments='{"a": 1}', content="x")
    assert same(ours, calls(OURS, arguments="{}", reasoning_content="hm"), Matching.CALL_IDS)
    assert not same(ours, calls(OTHER, arguments='{"a": 1}', content="x"), Matching.CALL_IDS)
    assert not same({"role": "user", "content": "a"}, {"role": "user", "content": "b"}, Matching.CALL_IDS)


@pytest.mark.parametrize("ids", [("",), ("c",), ("call_1",), (OURS, "c"), (f"{OURS}x",), (f"x{OURS}",), (f"{OURS}\n",)])
def test_a_message_with_an_id_of_the_client_s_own_is_known_by_all_of_it(ids: tuple[str, ...]) -> None:
    """Nobody promises that it uses one once."""
    assert same(calls(*ids), calls(*ids), Matching.CALL_IDS)
    assert not same(calls(*ids, arguments='{"a": 1}'), calls(*ids, arguments='{"a": 2}'), Matching.CALL_IDS)
    assert not same(calls(*ids, content="a"), calls(*ids, content="b"), Matching.CALL_IDS)


def told(*ids: str, spell: Callable[[object], str] = str, argument: str = "ls") -> str:
    """The calls as smolagents tells them, behind what the reply said."""
    listed = [{"id": each, "type": "function", "function": {"name": "f", "arguments": {"a": argument}}} for each in ids]
    return f"I look.\nCalling tools:\n{spell(listed)}"


@pytest.mark.parametrize("argument", ["ls", "it's", '"', "'\"\\", "]}\n[{", "日本\u2028語", "{'id': 'call_mine'}"])
@pytest.mark.parametrize("spell", [str, json.dumps])
@pytest.mark.parametrize("ids", [(OURS,), (OURS, OTHER)])
def test_calls_that_a_client_tells_as_text_are_known_by_their_ids(
    ids: tuple[str, ...], spell: Callable[[object], str], argument: str
) -> None:
    """Ids of ours only, in what the assistant said only."""
    ours, text = calls(*ids, content="I look."), told(*ids, spell=spell, argument=argument)
    assert same(ours, {"role": "assistant", "content": text}, Matching.CALL_IDS)
    assert same(ours, {"role": "assistant", "content": f"{text}\n"}, Matching.CALL_IDS)
    assert not same(ours, {"role": "assistant", "content": told(*ids, THIRD)}, Matching.CALL_IDS)
    assert not same(ours, {"role": "assistant", "content": told(*ids[1:], "call_mine")}, Matching.CALL_IDS)
    assert not same(ours, {"role": "user", "content": text}, Matching.CALL_IDS)
    assert not same(ours, {"role": "assistant", "content": text})


CALL_AS_TEXT = f'{{"id": "{OURS}", "type": "function", "function": {{"name": "f"}}}}'


@pytest.mark.parametrize(
    "quote",
    [
        f'I used {{"id": "{OURS}"}}: %s',
        f"I used [{CALL_AS_TEXT}]: %s",
        f"%s\nI used [{CALL_AS_TEXT}]",
        f"%s\n{CALL_AS_TEXT}",
        f"[{CALL_AS_TEXT}] %s",
        f"[{CALL_AS_TEXT}, %s]",
        f'[{CALL_AS_TEXT}, {{"id": "%s", "type": "function", "function": {{}}}}]',
        f"[{CALL_AS_TEXT}] %s [{CALL_AS_TEXT}]",
        f'[{CALL_AS_TEXT}, "%s]',
        f"[{CALL_AS_TEXT[:-1]}, %s",
        f"[[{CALL_AS_TEXT}, %s]]",
        f'[{{"id": "{OURS}"}}, %s]',
    ],
)
def test_a_text_that_quotes_a_call_is_known_by_all_of_it(quote: str) -> None:
    """It announces none: a list of calls and nothing else is the last line of one that does."""
    found, nothing = ({"role": "assistant", "content": quote % said} for said in ("found", "nothing"))
    assert same(found, found, Matching.CALL_IDS)
    assert not same(found, nothing, Matching.CALL_IDS)
    assert not same(found, calls(OURS), Matching.CALL_IDS)


@given(text=st.text(alphabet="[]{}'\"\\,: \nc"))
def test_no_text_breaks_the_search_for_calls(text: str) -> None:
    """Brackets and quotes in any order."""
    messages = [{"role": "assistant", "content": f"[{CALL_AS_TEXT}{text}{end}"} for end in ("", "]")]
    for message in messages:
        assert same(message, message, Matching.CALL_IDS)


@given(arguments=st.text())
@pytest.mark.parametrize("matching", list(Matching))
def test_no_arguments_break_a_form(matching: Matching, arguments: str) -> None:
    """Whatever a model or a client wrote."""
    assert same(call(arguments), call(arguments), matching)


def test_the_first_tool_that_differs_is_told() -> None:
    """Added, taken away, changed; shortened like any value."""
    first, second = ({"type": "function", "function": {"name": name}} for name in ("first", "second"))
    assert find_other_tools([first], [first]) is None
    found = find_other_tools([first, second], [first])
    assert found is not None
    assert (found.field, found.sent) == ("tools", "")
    assert "second" in found.recorded
    changed = find_other_tools([first], [second, first])
    assert changed is not None
    assert ("first" in changed.recorded, "second" in changed.sent) == (True, True)


def test_matchings_combine() -> None:
    """A client that does both needs both."""
    ours, theirs = call('{"a": 1}', reasoning_content="hm"), call('{"a":1}')
    assert same(ours, theirs, Matching.LOOSE_TOOL_CALLS, Matching.IGNORE_REASONING)
    assert not same(ours, theirs, Matching.LOOSE_TOOL_CALLS)


def test_a_function_by_path_decides_what_counts() -> None:
    """The path names a function from a message to its normal form."""
    path = "tests.custom_matching:role_only"
    assert same({"role": "user", "content": "a"}, {"role": "user", "content": "b"}, path)
    assert not same({"role": "user", "content": "a"}, {"role": "tool", "content": "a"}, path)


@pytest.mark.parametrize("name", ["loose", "no.such.module:function", "json:no_such_function", "json", ""])
def test_a_name_that_is_no_matching_is_refused_by_name(name: str) -> None:
    """A typing error does not silently mean strict."""
    with pytest.raises(MalformedRequest) as refused:
        normal_form([name])
    assert refused.value.param == "matching"


def test_a_function_that_fails_is_told_as_such() -> None:
    """Somebody else's bug is not a bare 500."""
    form = normal_form(["tests.custom_matching:broken"])
    with pytest.raises(MalformedRequest, match="broken failed"):
        form({"role": "user", "content": "a"})


@given(arguments=st.text())
def test_no_arguments_break_the_loose_form(arguments: str) -> None:
    """Whatever a model wrote as arguments, its history can be matched."""
    assert same(call(arguments), call(arguments), Matching.LOOSE_TOOL_CALLS)


@given(value=st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists))
def test_any_spelling_of_the_same_arguments_matches(value: object) -> None:
    """Indentation and escapes are spelling."""
    ours, theirs = json.dumps({"a": value}), json.dumps({"a": value}, indent=2, ensure_ascii=False)
    assert same(call(ours), call(theirs), Matching.LOOSE_TOOL_CALLS)


def test_a_divergence_names_message_field_and_both_values() -> None:
    """The reader sees what the client rewrote."""
    recorded = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi there"}]
    sent = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi you"}]
    assert find_divergence(recorded, sent, 3, STRICT) == Divergence(4, "content", "hi there", "hi you")


def test_a_longer_history_and_an_equal_one_do_not_diverge() -> None:
    """Going on, or asking again, is not a rewrite."""
    recorded = [{"role": "user", "content": "hello"}]
    assert find_divergence(recorded, [*recorded, {"role": "user", "content": "more"}], 0, STRICT) is None
    assert find_divergence(recorded, recorded, 0, STRICT) is None


def test_a_message_that_was_left_out_is_told() -> None:
    """A shortened history diverges where it ends."""
    recorded = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    found = find_divergence(recorded, recorded[:1], 0, STRICT)
    assert found is not None
    assert (found.message, found.field, found.sent) == (1, "message", "")


def test_long_values_are_shortened_around_the_difference() -> None:
    """The record stays readable whatever was sent."""
    recorded, sent = (
        [{"role": "user", "content": "x" * 500 + "A" + "x" * 500}],
        [{"role": "user", "content": "x" * 1001}],
    )
    found = find_divergence(recorded, sent, 0, STRICT)
    assert found is not None
    assert "A" in found.recorded
    assert len(found.recorded) <= 82
    assert found.recorded.startswith("…")
