"""What a client puts at the head of every prompt anew is taken out by rules, and the conversation is one branch."""

import pytest

from harness.dialects.model_request import WireCall
from harness.dialects.openai_chat_request import parse_request
from harness.dialects.prompt_noise import BILLING_HEADER, NoiseRules
from harness.errors import ScenarioError
from harness.server.settings import ServerSettings
from harness.tokens.history import History
from tests.builders import assistant, body, user
from tests.session_servers.served import Client, Served, says, session_on

HEADER = "x-anthropic-billing-header: cch=1;\n"


@pytest.mark.parametrize(
    ("text", "left", "noise"),
    [
        ("x-anthropic-billing-header: cch=1;\nBe kind.", "Be kind.", "x-anthropic-billing-header: cch=1;\n"),
        ("x-anthropic-billing-header: cch=1;", "", "x-anthropic-billing-header: cch=1;"),
        ("TIME 3 TIME 4 go", "go", "TIME 3 TIME 4 "),
        ("go x-anthropic-billing-header: cch=1;", "go x-anthropic-billing-header: cch=1;", ""),
    ],
)
def test_rules_take_out_what_stands_at_the_head(text: str, left: str, noise: str) -> None:
    """As often as one of them matches there, and nowhere else."""
    request = parse_request(WireCall(body([{"role": "system", "content": text}, user("TIME 5")])))

    quiet = NoiseRules([BILLING_HEADER, r"TIME \d+ "]).take_out(request)

    head = {"role": "system", "content": left}
    assert (list(quiet.request.messages), quiet.noise) == ([head, user("TIME 5")], noise)


@pytest.mark.parametrize("role", ["system", "developer"])
def test_prompts_of_a_system_have_noise(role: str) -> None:
    """Under either name."""
    quiet = NoiseRules([BILLING_HEADER]).take_out(
        parse_request(WireCall(body([{"role": role, "content": f"{HEADER}Be."}])))
    )

    assert (quiet.request.messages[0]["content"], quiet.noise) == ("Be.", HEADER)


@pytest.mark.parametrize("known", [0, 1])
def test_what_a_user_says_is_no_noise(known: int) -> None:
    """Who asks what the header means is read, also where the message is known by its bytes."""
    history = History()
    for _ in range(known + 1):
        request = parse_request(WireCall(body([user(f"{HEADER}what is this?")])), history=history)
        history.read(request.messages, request.tools, request.recall)

    quiet = NoiseRules([BILLING_HEADER]).take_out(request)

    assert request.recall.known == known
    assert (list(quiet.request.messages), quiet.noise) == ([user(f"{HEADER}what is this?")], "")


def test_without_rules_nothing_is_taken_out() -> None:
    """The request as it is."""
    request = parse_request(WireCall(body([{"role": "system", "content": HEADER}])))

    assert NoiseRules([]).take_out(request).request is request


@pytest.mark.parametrize("pattern", ["(", "x*"])
def test_a_rule_that_is_none_is_refused(pattern: str) -> None:
    """Before a server starts."""
    with pytest.raises(ScenarioError, match="noise"):
        ServerSettings(noise=(pattern,)).check()


async def ask(client: Client, session: Served, number: int, *messages: object) -> None:
    """A call with a header of its own."""
    system = [{"type": "text", "text": f"x-anthropic-billing-header: cch={number};"}, {"type": "text", "text": "Be."}]
    content = {"max_tokens": 50, "system": system, "messages": list(messages)}
    answer = await client.http.post(f"/sessions/{session.session_id}/v1/messages", json=content)
    assert answer.status_code == 200


async def test_a_conversation_with_another_header_each_time_is_one_branch() -> None:
    """The record has the header once, and the model never saw it; a history that is known by its bytes is no matter."""
    history = [user("hi"), assistant("one"), user("and?"), assistant("two"), user("so?")]
    async with session_on(*says("one", "two", "three")) as (client, session):
        await ask(client, session, 1, *history[:1])
        await ask(client, session, 1, *history[:3])
        await ask(client, session, 2, *history)
        record = await client.record(session)

    assert [turn["parent"] for turn in record["turns"]] == [None, 0, 1]
    assert record["turns"][0]["messages_delta"][0] == {"role": "system", "content": "Be."}
    notes = [turn["notes"].get("noise") for turn in record["turns"]]
    assert notes == ["x-anthropic-billing-header: cch=1;\n", None, None]
