"""What may differ in a history that a client sends back, and what a branch says about why it is one."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import MalformedRequest
from harness.sessions.divergence import Divergence, find_divergence, find_other_tools
from harness.tokens.matching import EXACT, Matching, chain_keys, next_key, normal_form, same_arguments


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
    """Whether the second message means what the first one does under that matching; then both have the same key."""
    form = normal_form(matching)
    means_it = form.contradiction(left, right) is None
    have_one_key = next_key(b"", left, form) == next_key(b"", right, form)
    assert have_one_key or not means_it
    return means_it


BEFORE = (
    {"role": "user", "content": "hi"},
    call('{"a": 1, "b": 1.5}', reasoning_content="hm")
    | {"tool_calls": [{"id": OURS, "type": "function", "function": {"name": "f", "arguments": '{"a": 1, "b": 1.5}'}}]},
    {"role": "tool", "tool_call_id": OURS, "content": "two "},
    {"role": "assistant", "content": "yes\n", "reasoning_content": "so"},
)
"""What sessions were sent when a key covered all of a message."""


@pytest.mark.parametrize(
    ("matching", "key"),
    [
        ((), "90b215330b5e3eaa413f43a6a00131d6"),
        (("loose_tool_calls",), "82cf23974893f5f310b06fcc7bb7784c"),
        (("json_numbers",), "aecbb0a8a46f3d27b7f3d8b9552eec40"),
        (("ignore_reasoning",), "00181529404f32a802354b267fd4c3b7"),
        (("trimmed",), "212482600345689c741261d1424a1883"),
        (("call_ids",), "904b371072e41588caf967a93cc5c310"),
        (("json_numbers", "trimmed"), "8fb9684db6198afb0d7bac212dc9641f"),
    ],
)
def test_exact_keys_are_those_of_stores_from_before(matching: tuple[str, ...], key: str) -> None:
    """The digests in them were computed without `exact`; they are never edited."""
    tools = [{"type": "function", "function": {"name": "f"}}]
    for exact in ("exact", "strict"):
        assert chain_keys(BEFORE, tools, normal_form((*matching, exact)))[-1].hex() == key


def said(content: str | None = "x", **extra: Any) -> dict[str, Any]:
    """An assistant message without calls."""
    return {"role": "assistant", "content": content, **extra}


@pytest.mark.parametrize(
    "sent",
    [
        said(reasoning_content="hm"),
        said(),
        said(reasoning_content=None),
        said(reasoning_content=""),
        said(reasoning_content=" hm\n"),
        said("x\n\n"),
        said(tool_calls=None, refusal=None),
    ],
)
def test_what_a_client_does_not_say_does_not_contradict(sent: dict[str, Any]) -> None:
    """Reasoning that was left out, in whatever way, and line breaks at the end."""
    assert same(said(reasoning_content="hm"), sent)
    assert same(said("x\n", reasoning_content="hm"), sent)
    assert same(said(reasoning_content="hm"), sent, "exact") is (sent == said(reasoning_content="hm"))


@pytest.mark.parametrize(
    ("sent", "field"),
    [
        (said(reasoning_content="hm hm"), "reasoning_content"),
        (said("y", reasoning_content="hm"), "content"),
        (said(" x"), "content"),
        (said(""), "content"),
        (said(None), "content"),
        (said(redacted_thinking=["data"]), "redacted_thinking"),
        (call("{}"), "tool_calls"),
        ({"role": "user", "content": "x"}, "role"),
    ],
)
def test_what_a_client_says_has_to_mean_the_same(sent: dict[str, Any], field: str) -> None:
    """Other words, words that were not there, fields beyond ours; an answer without calls needs its content."""
    found = normal_form(()).contradiction(said(reasoning_content="hm"), sent)
    assert found is not None
    assert found.field == field
    assert not same(said(reasoning_content="hm"), sent)


def test_a_client_may_put_a_name_beside_the_words_of_the_model() -> None:
    """As agent frameworks do, which the record says nothing of; two names are two speakers."""
    assert same(said(), said(name="assistant"))
    assert same(call("{}"), call("{}") | {"name": "assistant"})
    assert same(said(name="assistant"), said())
    assert not same(said(name="assistant"), said(name="reviewer"))
    assert not same(said(), said(name="assistant"), "exact")


def test_reasoning_that_was_never_said_is_an_edit() -> None:
    assert not same(said(), said(reasoning_content="hm"))


@pytest.mark.parametrize(
    ("recorded", "sent", "is_same"),
    [
        ("I look.", "I look.", True),
        ("I look.", "", True),
        ("I look.", None, True),
        ("I look.", "\n", True),
        ("I look.", "I look.\n", True),
        ("I look.", "I looked.", False),
        ("I look.", " ", False),
        (None, "", True),
        (None, "I look.", False),
    ],
)
def test_content_beside_calls_may_be_dropped_and_not_edited(
    recorded: str | None, sent: str | None, is_same: bool
) -> None:
    for ids in ((OURS,), ("c",)):
        assert same(calls(*ids, content=recorded), calls(*ids, content=sent)) is is_same


@pytest.mark.parametrize(
    ("recorded", "sent", "is_same"),
    [
        ((OURS, OTHER), (OURS, OTHER), True),
        ((OURS,), ("call_1",), True),
        ((OURS,), ("",), True),
        ((OURS,), (OTHER,), False),
        ((OURS, OTHER), (OTHER, OURS), False),
        ((OURS, OTHER), ("c", OTHER), True),
        ((OURS, OTHER), ("c", THIRD), False),
        ((OURS, OTHER), (OURS,), False),
        (("c",), ("d",), True),
        (("c",), (OURS,), False),
        (("c", "c"), ("c", "c"), True),
    ],
)
def test_ids_of_ours_are_told_apart_and_those_of_clients_are_not(
    recorded: tuple[str, ...], sent: tuple[str, ...], is_same: bool
) -> None:
    """One of ours was handed out for one call; a client's may be used again, or made anew each time."""
    assert same(calls(*recorded), calls(*sent)) is is_same


@pytest.mark.parametrize(
    ("ours", "theirs", "is_same"),
    [
        ('{"a": 1, "b": 2}', '{"b":2,"a":1}', True),
        ('{"a": 1, "b": 1000}', '{"b": 1e3, "a": 1.0}', True),
        ('{"a": -0}', '{"a": 0}', True),
        ('{"a": -0.0}', '{"a": 0}', True),
        ('{"a": 1}', '{"a": true}', False),
        ('{"a": 0}', '{"a": false}', False),
        ('{"a": 0}', '{"a": null}', False),
        ('{"a": null}', "{}", False),
        ('{"a": "1"}', '{"a": 1}', False),
        ('{"a": "x"}', '{"a": "x "}', False),
        ('{"a": [1, 2]}', '{"a": [2, 1]}', False),
        ('{"a": "é"}', '{"a": "\\u00e9"}', True),
        ("{}", "", True),
        ("{}", " \n", True),
        ("{}", "null", True),
        ("", "null", True),
        ("{}", "[]", False),
        ("{}", '""', False),
        ('"x"', "x", False),
        ("not json", "not json", True),
        ("not json", "not  json", False),
        ('{"a": 1, "a": 2}', '{"a": 1, "a": 2}', True),
        ('{"a": 1, "a": 2}', '{"a": 2}', False),
        ('{"a": NaN}', '{"a": NaN}', True),
        ('{"a": NaN}', '{"a":NaN}', False),
        ('{"a": 1e999}', '{"a": null}', False),
        ('{"a": 1e999}', '{"a": -1e999}', False),
        (r'{"a": "\ud83d"}', r'{"a": "\ud83d"}', True),
        (r'{"a": "\ud83d"}', r'{"a":"\ud83d"}', False),
        ('{"a": %s}' % ("1" * 5_000), '{"a": %s}' % ("1" * 5_000), True),
        ("[" * 99 + "]" * 99, "[" * 98 + "[ ]" + "]" * 98, True),
        ("[" * 101 + "]" * 101, "[" * 100 + "[ ]" + "]" * 100, False),
        ("[" * 9_000 + "]" * 9_000, "[" * 9_000 + "]" * 9_000, True),
        ('{"a": "%s"}' % ("x" * 1_000_000), '{"a":"%s"}' % ("x" * 1_000_000), True),
    ],
)
def test_arguments_are_compared_as_json_values(ours: str, theirs: str, is_same: bool) -> None:
    """Key order, white space, escapes and the spelling of numbers do not count; what parsers differ on is a text."""
    assert same(call(ours), call(theirs)) is is_same
    assert same_arguments(ours, theirs) is is_same
    assert not same(call(ours), call(theirs), "exact") or ours == theirs


@pytest.mark.parametrize(
    ("ours", "theirs", "is_same"),
    [
        ('{"a": 1, "b": 2}', '{"b":2,"a":1}', True),
        ("", "{}", True),
        ('{"a": 1}', '{"a": true}', False),
        ('{"a": 1}', '{"a": 1.0}', False),
        ('{"a": "1"}', '{"a": 1}', False),
        ('{"a": 1, "a": 2}', '{"a": 2}', False),
        ("not json", "not  json", False),
    ],
)
def test_sessions_of_old_stores_compare_arguments_as_typed_json(ours: str, theirs: str, is_same: bool) -> None:
    """Those that were created with `loose_tool_calls`, whose keys are exact but for that."""
    assert same(call(ours), call(theirs), "exact", "loose_tool_calls") is is_same


@pytest.mark.parametrize("matching", [(), *((each,) for each in Matching)], ids=str)
@pytest.mark.parametrize("value", ['"\\ud83d"', "1e999", '{"\\ud83d": 1}', "1" * 400])
def test_arguments_that_cannot_be_written_again_are_compared_as_text(matching: tuple[str, ...], value: str) -> None:
    """Half a surrogate pair, and numbers beyond those of other parsers."""
    assert same(call(f'{{"a": {value}}}'), call(f'{{"a": {value}}}'), *matching)
    assert not same(call(f'{{"a": {value}}}'), call('{"a": null}'), *matching)


def test_ignore_reasoning_lets_a_client_say_anything_there() -> None:
    thought = said(reasoning_content="hm")
    assert same(thought, said(reasoning_content="other"), Matching.IGNORE_REASONING)
    assert not same(thought, said("y"), Matching.IGNORE_REASONING)


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
    messages = [{"role": "assistant", "content": f"[{CALL_AS_TEXT}{text}{end}"} for end in ("", "]")]
    for message in messages:
        assert same(message, message, Matching.CALL_IDS)


@given(arguments=st.text())
@pytest.mark.parametrize("matching", list(Matching))
def test_no_arguments_break_a_form(matching: Matching, arguments: str) -> None:
    assert same(call(arguments), call(arguments), matching)


def test_the_first_tool_that_differs_is_told() -> None:
    first, second = ({"type": "function", "function": {"name": name}} for name in ("first", "second"))
    assert find_other_tools([first], [first]) is None
    found = find_other_tools([first, second], [first])
    assert found is not None
    assert (found.field, found.sent) == ("tools", "")
    assert "second" in found.recorded
    changed = find_other_tools([first], [second, first])
    assert changed is not None
    assert ("first" in changed.recorded, "second" in changed.sent) == (True, True)


def test_what_a_regex_finds_does_not_count_in_messages_of_others() -> None:
    """Only that, and never in what the model said."""
    rule = r"/^Took \d+ s\n/"
    ours, theirs, other = (
        {"role": "tool", "content": text} for text in ("Took 1 s\nok", "Took 22 s\nok", "Took 1 s\nno")
    )
    assert same(ours, theirs, rule)
    assert not same(ours, other, rule)
    assert not same(ours | {"role": "assistant"}, theirs | {"role": "assistant"}, rule)
    for bad in ("/(/", "/a{99999999999999999999}/", f"/{'(' * 5_000}{')' * 5_000}/"):
        with pytest.raises(MalformedRequest, match="is no regular expression"):
            normal_form((bad,))


def test_matchings_combine() -> None:
    ours, theirs = calls(OURS, content="a "), calls(OURS, content="b")
    assert same(ours, theirs, Matching.TRIMMED, Matching.CALL_IDS)
    assert not same(ours, theirs, Matching.TRIMMED)
    assert same(ours, calls(OURS, content=" a"), Matching.EXACT, Matching.TRIMMED)
    assert not same(ours, calls(OURS, arguments="{ }", content=" a"), Matching.EXACT, Matching.TRIMMED)


def test_a_function_by_path_decides_what_counts() -> None:
    """The path names a function from a message to its normal form."""
    path = "tests.custom_matching:role_only"
    assert same({"role": "user", "content": "a"}, {"role": "user", "content": "b"}, path)
    assert not same({"role": "user", "content": "a"}, {"role": "tool", "content": "a"}, path)


@pytest.mark.parametrize("name", ["loose", "no.such.module:function", "json:no_such_function", "json", ""])
def test_a_name_that_is_no_matching_is_refused_by_name(name: str) -> None:
    """A typing error does not silently mean the default."""
    with pytest.raises(MalformedRequest) as refused:
        normal_form([name])
    assert refused.value.param == "matching"


@pytest.mark.parametrize("function", ["calls_as_text", "half_calls"])
def test_a_function_may_make_anything_of_a_message(function: str) -> None:
    """What it returns counts; that of an assistant message as the default has it."""
    path = f"tests.custom_matching:{function}"
    assert same(said("x"), said("y"), path)
    assert not same(said("x"), call("{}"), path)


def test_a_function_that_fails_is_told_as_such() -> None:
    """Somebody else's bug is not a bare 500."""
    form = normal_form(["tests.custom_matching:broken"])
    with pytest.raises(MalformedRequest, match="broken failed"):
        form({"role": "user", "content": "a"})


@given(arguments=st.text())
def test_no_arguments_break_the_default(arguments: str) -> None:
    """Whatever a model wrote as arguments, its history can be matched."""
    assert same(call(arguments), call(arguments))


@given(value=st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists))
def test_any_spelling_of_the_same_arguments_matches(value: object) -> None:
    ours, theirs = json.dumps({"a": value}), json.dumps({"a": value}, indent=2, ensure_ascii=False)
    assert same(call(ours), call(theirs))


def test_a_divergence_names_message_field_and_both_values() -> None:
    recorded = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi there"}]
    sent = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi you"}]
    assert find_divergence(recorded, sent, 3, EXACT) == Divergence(4, "content", "hi there", "hi you")


def test_a_longer_history_and_an_equal_one_do_not_diverge() -> None:
    """Going on, or asking again, is not a rewrite."""
    recorded = [{"role": "user", "content": "hello"}]
    assert find_divergence(recorded, [*recorded, {"role": "user", "content": "more"}], 0, EXACT) is None
    assert find_divergence(recorded, recorded, 0, EXACT) is None


def test_a_message_that_was_left_out_is_told() -> None:
    recorded = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    found = find_divergence(recorded, recorded[:1], 0, EXACT)
    assert found is not None
    assert (found.message, found.field, found.sent) == (1, "message", "")


def test_long_values_are_shortened_around_the_difference() -> None:
    recorded, sent = (
        [{"role": "user", "content": "x" * 500 + "A" + "x" * 500}],
        [{"role": "user", "content": "x" * 1001}],
    )
    found = find_divergence(recorded, sent, 0, EXACT)
    assert found is not None
    assert "A" in found.recorded
    assert len(found.recorded) <= 82
    assert found.recorded.startswith("…")
