"""What one request may hold, and that nothing an agent sends stops the event loop."""

import asyncio
import json
import threading
import time
from threading import Event
from types import FrameType

import pytest

from harness.dialects.request_limits import RequestLimits, read_limits
from harness.errors import PromptTooLong, ScenarioError, ServerBusy
from harness.server.prompts import HeavyWork
from harness.server.settings import ServerSettings
from harness.server.telemetry.metrics import ServerMetrics
from harness.tokens.fitting import require_fitting
from tests.builders import body, tool, toy_tokenizer, user
from tests.session_servers.served import says, serving, session_on, url_of

SMALL = RequestLimits(
    messages=3,
    tools=2,
    schema_bytes=300,
    arguments_bytes=20,
    stop_strings=2,
    stop_characters=4,
    metadata_bytes=100,
    json_depth=8,
)
HI = [user("hi")]


def calling(arguments: str):
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [user("a"), {"role": "assistant", "content": "", "tool_calls": [call]}]


def called(count: int, name: str):
    call = {"type": "function", "function": {"name": name, "arguments": ""}}
    calls = [{"id": f"c{i}", **call} for i in range(count)]
    return [user("a"), {"role": "assistant", "content": "", "tool_calls": calls}, user("b")]


def nested(depth: int):
    return {"a": nested(depth - 1)} if depth else 1


def schema(value):
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": value}}


@pytest.mark.parametrize(
    ("limit", "param", "messages", "fields"),
    [
        ("messages", "messages", HI * 4, {}),
        ("tools", "tools", HI, {"tools": [tool("a"), tool("b"), tool("c")]}),
        ("schema_bytes", "tools", HI, {"tools": [tool("a", title="x" * 300)]}),
        ("schema_bytes", "response_format", HI, {"response_format": schema({"title": "x" * 300})}),
        ("arguments_bytes", "messages[1].tool_calls", [*calling('{"a": "%s"}' % ("x" * 20)), user("b")], {}),
        ("messages", "tool_calls", called(4, "f"), {}),
        ("stop_strings", "stop", HI, {"stop": ["a", "b", "c"]}),
        ("stop_characters", "stop", HI, {"stop": "12345"}),
        ("json_depth", "tools", HI, {"tools": [tool("a", deep=nested(8))]}),
    ],
)
async def test_a_request_over_a_limit_is_refused_by_the_name_of_the_limit(limit, param, messages, fields):
    """400: what was expected and what came; counted, final, and the session continues."""
    async with session_on(*says("hello"), settings=ServerSettings(limits=SMALL)) as (client, session):
        answer = await client.chat(session, messages, **fields)
        metrics = (await client.http.get("/metrics")).text
        served = await client.chat(session, HI)

    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "over_limit", param)
    assert f"`{limit}`" in error["message"]
    assert answer.headers["x-should-retry"] == "false"
    assert f'harness_over_limit_total{{limit="{limit}"}} 1.0' in metrics
    assert served.status_code == 200


@pytest.mark.parametrize(
    ("limit", "config"),
    [
        ("metadata_bytes", {"metadata": {"a": "x" * 100}}),
        ("json_depth", {"metadata": nested(9)}),
        ("stop_strings", {"sampling": {"stop": ["a", "b", "c"]}}),
        ("stop_strings", {"sampling": {"stop_token_ids": [1, 2, 3]}}),
    ],
)
async def test_a_session_over_a_limit_is_refused_by_the_name_of_the_limit(limit, config):
    """Metadata is in every sample, stop strings are in every turn."""
    async with serving(settings=ServerSettings(limits=SMALL)) as client:
        answer = await client.http.post("/sessions", json=config)

    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "over_limit")
    assert f"`{limit}`" in answer.json()["error"]["message"]


def test_an_operator_states_limits_by_name():
    """What is not stated stays as it is."""
    assert read_limits(["tools=5", "body_bytes=7"]) == RequestLimits(tools=5, body_bytes=7)


@pytest.mark.parametrize("setting", ["tool=5", "tools", "tools=0", "tools=-1", "tools=" + "9" * 5_000])
def test_a_limit_that_is_none_is_refused(setting):
    """The message lists the names there are."""
    with pytest.raises(ScenarioError, match="body_bytes"):
        read_limits([setting])


MANY = {f"p{i}": {"type": "string"} for i in range(20_000)}
HOSTILE = {
    "content that no encoding makes fit": lambda: body([user("x" * 4_000_000)]),
    "content that does not fit": lambda: body([user("x" * 500_000)]),
    "a large description": lambda: body(HI, tools=[tool("f", description="x" * 900_000)]),
    "a large schema": lambda: body(HI, tools=[tool("f", properties=MANY)]),
    "large arguments": lambda: body([*calling(json.dumps({"a": "x" * 900_000})), user("b")]),
    "the name of a call": lambda: body(called(1, "x" * 4_000_000)),
    "many calls": lambda: body(called(6_000, "f")),
    "more calls": lambda: body(called(100_000, "f")),
    "an id": lambda: body([*called(1, "f"), {"role": "tool", "tool_call_id": "x" * 4_000_000, "content": "b"}]),
    "a schema of the answer": lambda: body(HI, response_format=schema({f"p{i}": {} for i in range(60_000)})),
    "many messages": lambda: body(HI * 30_000),
    "more messages": lambda: body(HI * 100_000),
    "stop strings": lambda: body(HI, stop=[f"stop{i}" for i in range(50_000)]),
    "an unknown field": lambda: body(HI, other=[0] * 1_000_000),
}


@pytest.fixture(name="raw", params=HOSTILE)
def _raw(request):
    return HOSTILE[request.param]()


async def test_nothing_an_agent_sends_stops_the_loop(raw, loop_watch):
    """Served or refused with an error of the agent's, with little done on the event loop."""
    async with session_on(*says("hello"), context_length=100_000) as (client, session):
        answer = await client.http.post(url_of(session), content=raw, timeout=60)

    assert answer.status_code in (200, 400), answer.text[:300]
    assert len(answer.content) < 2_000
    assert loop_watch.worst_s > 0


async def test_a_thread_that_reads_a_large_body_rests(request):
    """It shares the interpreter with the event loop, whose turns would take twice as long."""
    rests: list[str] = []

    def look(frame: FrameType, event: str, called: object) -> None:
        if event == "c_call" and called is time.sleep:
            rests.append(frame.f_code.co_name)

    threading.setprofile(look)  # of the threads that begin from now on
    request.addfinalizer(lambda: threading.setprofile(None))
    async with session_on(*says("hello"), context_length=100_000) as (client, session):
        await client.http.post(url_of(session), content=body(HI * 3_000), timeout=60)

    assert "rest_between" in rests


async def test_an_answer_with_many_logprobs_is_written_off_the_loop():
    """Eighteen thousand entries, asked for in thirty bytes: a second of Python for a long answer."""
    async with session_on(*says("x" * 3_000)) as (client, session):
        answer = await client.chat(session, HI, logprobs=True, top_logprobs=5)
        threads = [thread.name for thread in threading.enumerate()]

    content = answer.json()["choices"][0]["logprobs"]["content"]
    assert (len(content), len(content[0]["top_logprobs"])) == (3_001, 5)
    assert any(name.startswith("heavy-work") for name in threads)


async def test_a_long_conversation_that_an_id_stands_for_is_read_off_the_loop():
    """A hundred bytes ask for all of it; each of its own bodies was small."""
    async with session_on(*says("one", "two", "three")) as (client, session):
        url, threads = f"/sessions/{session.session_id}/v1/responses", []
        previous = None
        for text in ("a" * 15_000, "b" * 15_000, "more"):
            asked = {"model": "m", "input": text, "previous_response_id": previous}
            answer = await client.http.post(url, json=asked)
            assert answer.status_code == 200, answer.text
            previous = answer.json()["id"]
            threads.append(len(client.server._turns.heavy_work._executor._threads))
        record = await client.record(session)

    assert threads == [0, 0, 1]
    assert [turn["parent"] for turn in record["turns"]] == [None, 0, 1]


async def test_a_long_conversation_that_begins_as_before_is_read_on_the_loop():
    """However long it is, its new messages are few; another one of its length is read off the loop."""
    answers = ("one", "two", "three", "four", "five", "six")
    async with session_on(*says(*answers)) as (client, session):
        url, threads = f"/sessions/{session.session_id}/v1/chat/completions", []
        sent: list[dict[str, str]] = []
        for answer in ("", *answers[:5]):
            sent += [{"role": "assistant", "content": answer}] if answer else []
            sent += [{"role": "user", "content": "more", "aside": "a" * 90_000}]  # bytes that the model does not see
            response = await client.http.post(url, json={"model": "m", "messages": sent})
            assert response.status_code == 200, response.text
            threads.append(len(client.server._turns.heavy_work._executor._threads))
        await client.http.post(url, json={"model": "n", "messages": sent})
        threads.append(len(client.server._turns.heavy_work._executor._threads))
        record = await client.record(session)

    assert threads == [0, 0, 0, 0, 0, 0, 1]
    assert [turn["parent"] for turn in record["turns"][:6]] == [None, 0, 1, 2, 3, 4]


async def test_long_calls_that_ids_stand_for_are_read_off_the_loop():
    """A client may send the arguments in few bytes where many were sampled."""
    spaced = '<tool_call>\n{"name": "add", "arguments": {"a": %s2.0}}\n</tool_call>' % (" " * 26_000)
    async with session_on(*says(spaced, "two")) as (client, session):
        url, threads, sent = f"/sessions/{session.session_id}/v1/messages", [], list(HI)
        for _ in range(2):
            asked = {"max_tokens": 30_000, "messages": sent, "tools": [{"name": "add", "input_schema": {}}]}
            answer = await client.http.post(url, json=asked)
            assert answer.status_code == 200, answer.text
            [use] = [block for block in answer.json()["content"] if block["type"] == "tool_use"] or [None]
            result = [{"type": "tool_result", "tool_use_id": use["id"], "content": "5"}] if use else "end"
            sent += [{"role": "assistant", "content": [use]}, {"role": "user", "content": result}]
            threads.append(len(client.server._turns.heavy_work._executor._threads))
        record = await client.record(session)

    assert threads == [0, 1]
    assert [turn["parent"] for turn in record["turns"]] == [None, 0]


async def test_a_retry_count_of_any_length_is_no_bug_of_ours(client, session):
    """Python refuses to convert five thousand digits."""
    headers = {"x-stainless-retry-count": "9" * 5_000}
    answer = await client.http.post(url_of(session), content=body(HI), headers=headers)

    assert answer.status_code == 200


async def test_a_tool_that_is_not_offered_is_refused_in_few_words(client):
    """However many tools there are, and however long their names."""
    tools = [tool("n" * 500 + str(i)) for i in range(500)]
    choice = {"type": "function", "function": {"name": "m" * 500}}
    answer = await client.chat(await client.create(), HI, tools=tools, tool_choice=choice)

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tool_choice")
    assert len(answer.json()["error"]["message"]) < 1_000


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "r" * 100_000, "content": "x"}]},
        {"tool_choice": "c" * 100_000},
        {"response_format": {"type": "t" * 100_000}},
        {"seed": 10**300},
        {"temperature": -(10**300)},
        {"top_logprobs": 10**18, "logprobs": True},
        {"tools": [{"type": "t" * 100_000, "function": {"name": "f"}}]},
    ],
    ids=lambda fields: next(iter(fields)),
)
async def test_a_refusal_says_little_whatever_is_wrong(client, session, fields):
    """What an agent sends is quoted in answers and logs, but not all of it."""
    answer = await client.http.post(url_of(session), json={"model": "m", "messages": HI} | fields)

    assert answer.status_code == 400
    assert len(answer.content) < 1_000


async def test_what_waits_for_the_heavy_threads_is_bounded_and_counted():
    """The first one is always taken, whatever its size; what is over is refused for now, and what ends makes room."""
    metrics = ServerMetrics()
    heavy = HeavyWork(metrics, 100)
    ended = Event()
    try:
        running = [asyncio.create_task(heavy.do(size, ended.wait)) for size in (90, 10)]
        await asyncio.sleep(0)
        with pytest.raises(ServerBusy) as refused:
            await heavy.do(1, ended.wait)
        assert "harness_heavy_work 2.0" in metrics.render().decode()
        ended.set()
        assert await asyncio.gather(*running) == [True, True]
        assert await heavy.do(1_000, lambda: "done") == "done"
    finally:
        ended.set()
        heavy.close()

    assert (refused.value.status, refused.value.retryable) == (503, True)
    assert "harness_heavy_work_bytes 0.0" in metrics.render().decode()


async def test_heavy_work_that_nobody_waits_for_never_begins():
    """A client that leaves the queue costs no thread, and gives its room back."""
    heavy = HeavyWork(ServerMetrics(), 100)
    ended = Event()
    begun: list[str] = []
    try:
        running = [asyncio.create_task(heavy.do(10, ended.wait)) for _ in range(2)]
        waiting = asyncio.create_task(heavy.do(80, lambda: begun.append("waiting")))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        ended.set()
        await asyncio.gather(*running)
        await heavy.do(100, lambda: begun.append("next"))
    finally:
        ended.set()
        heavy.close()

    assert begun == ["next"]


@pytest.mark.parametrize(("length", "fits"), [(120_000, True), (121_000, False)])
def test_a_text_is_counted_in_pieces(length, fits):
    """Of a text without tools, as many tokens as it has bytes on this tokenizer; a few per piece are allowed for."""

    def check() -> None:
        require_fitting(toy_tokenizer(), [user("x" * length)], (), 120_500)

    if fits:
        check()
    else:
        with pytest.raises(PromptTooLong):
            check()


def test_what_the_assistant_said_may_be_left_out_by_a_template():
    """Reasoning of earlier turns is dropped by most: it does not make a conversation too long by itself."""
    history = [user("a"), {"role": "assistant", "content": "b", "reasoning_content": "x" * 300_000}, user("c")]
    require_fitting(toy_tokenizer(), history, (), 100_000)
    with pytest.raises(PromptTooLong):
        require_fitting(toy_tokenizer(), history, (), 50_000)
