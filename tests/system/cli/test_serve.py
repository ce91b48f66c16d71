"""`harness serve` is a session server of its own, until somebody stops it."""

import asyncio
import json
import re
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from harness.server.store.sqlite import read_sessions
from tests.fake_engines.fake_server import serving
from tests.fake_engines.fake_sglang import FakeSGLang
from tests.fake_engines.providers import scripted_engine
from tests.harness_command import announced, start_harness, wait
from tests.toy_model import write_toy_model

HEAVY = {
    "torch",
    "transformers",
    "pyarrow",
    "ray",
    "openai",
    "renderers",
    "httpx",
    "harness.gateway.router",
    "harness.rollouts.client",
}
"""Modules that a session server before running engines has no use for; each costs it time to start, and memory."""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_sessions_are_served_until_a_signal(tmp_path: Path, number: signal.Signals):
    """On the port it was given, or any; the store keeps them. A script needs no model and no tokenizer."""
    store = tmp_path / "sessions.db"
    process = start_harness("serve", "--engine", "scripted", "--port", "0", "--store", store)
    assert process.stderr is not None
    url = next(_url(line) for line in process.stderr if "server_started" in line)
    token = next(found[1] for line in process.stderr if (found := re.match(r"admin token of this start: (\S+)", line)))
    with httpx.Client(base_url=url) as http:
        session = http.post("/sessions", headers={"authorization": f"Bearer {token}"}).json()
        answer = http.post(
            f"/sessions/{session['session_id']}/v1/chat/completions",
            json={"messages": [{"role": "user", "content": "Hello."}]},
            headers={"authorization": f"Bearer {session['api_key']}"},
        ).json()
    process.send_signal(number)

    assert wait(process).code == 0
    assert answer["choices"][0]["message"]["content"] == "Understood."
    assert store.is_file()


async def test_a_server_imports_nothing_that_it_has_no_use_for(tmp_path: Path):
    """Before an engine server, with a store, until it answers."""
    toy, log = write_toy_model(tmp_path / "toy"), tmp_path / "imports.txt"
    engine = scripted_engine()
    async with engine, serving(FakeSGLang(engine), notices_disconnects=False) as url:
        options = ("--tokenizer", toy, "--port", "0", "--store", tmp_path / "sessions.db", "--no-auth", "--json")
        command = ("serve", "--engine", f"sglang={url}", *options)
        process = start_harness(*command, env={"PYTHONPROFILEIMPORTTIME": "1"}, log=log)
        answered = await asyncio.to_thread(announced, process)
        process.send_signal(signal.SIGINT)
        await asyncio.to_thread(wait, process)
    imported = {line.rpartition("|")[2].strip() for line in log.read_text().splitlines() if "|" in line}

    assert answered["url"]
    assert "harness.server.serving" in imported
    assert imported & HEAVY == set()


@pytest.mark.parametrize(
    ("arguments", "is_made", "is_open"),
    [((), True, False), (("--admin-token", "chosen"), False, False), (("--no-auth",), False, True)],
)
def test_a_server_asks_for_a_token_unless_it_is_told_not_to(
    tmp_path: Path, arguments: tuple[str, ...], is_made: bool, is_open: bool
):
    """A token that was made is in the document once, one that was chosen nowhere; none in the log."""
    toy = write_toy_model(tmp_path / "toy")
    process = start_harness(*("serve", "--engine", "scripted", "--tokenizer", toy, "--port", "0", "--json"), *arguments)
    document = announced(process)
    statuses = [
        httpx.get(f"{document['url']}/sessions", headers={"authorization": f"Bearer {token}"}).status_code
        for token in ("wrong", document["admin_token"] or "chosen")
    ]
    process.send_signal(signal.SIGINT)
    ended = wait(process)

    assert (document["admin_token"] is not None) is is_made
    assert statuses == [200 if is_open else 401, 200]
    assert (document["admin_token"] or "chosen") not in ended.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_with_turns_in_flight_ends_the_server_well(tmp_path: Path, number: signal.Signals):
    """Code 0, no traceback; both clients are told to ask again, and the next server continues with both turns."""
    store = tmp_path / "sessions.db"
    process, url = _start_slow(tmp_path, "--stop-grace", "0", "--store", store)
    with ThreadPoolExecutor() as clients, httpx.Client(base_url=url) as http:
        asked = [clients.submit(_ask, http, stream=stream) for stream in (False, True)]
        while http.get("/health").json()["engine"]["running"] < 2:
            time.sleep(0.01)
        process.send_signal(number)
        answers = [each.result() for each in asked]
    ended = wait(process)

    assert (ended.code, "Traceback" in ended.stderr) == (0, False)
    assert [status for status, _ in answers] == [503, 503]
    assert all("server_stopping" in text for _, text in answers)
    assert ended.stderr.count('"event": "server_stopped"') == 1
    turns = [turn for session in read_sessions(store) for turn in session.turns]
    assert [turn.is_suspended for turn in turns] == [True, True]


def test_a_second_signal_ends_the_server_at_once(tmp_path: Path):
    """Whatever grace the first one gave."""
    process, url = _start_slow(tmp_path, "--stop-grace", "600")
    with ThreadPoolExecutor() as clients, httpx.Client(base_url=url, timeout=None) as http:
        asked = clients.submit(_ask, http, stream=False)
        while not http.get("/health").json()["engine"]["running"]:
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        while http.get("/health").json()["status"] == "ok":
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        ended = wait(process)
        with suppress(httpx.TransportError):
            asked.result()

    assert (ended.code, "Traceback" in ended.stderr) == (0, False)


def _start_slow(folder: Path, *options: str | Path) -> tuple[subprocess.Popen[str], str]:
    """A server whose answers take longer than any test, and its address."""
    script = folder / "script.toml"
    script.write_text('[[steps]]\ntext = "a long and slow answer"\ntoken_delay_s = 600\n')
    toy = write_toy_model(folder / "toy")
    command = ("serve", "--engine", "scripted", "--script", script, "--tokenizer", toy, "--port", "0", "--no-auth")
    process = start_harness(*command, *options)
    assert process.stderr is not None
    return process, next(_url(line) for line in process.stderr if "server_started" in line)


def _ask(http: httpx.Client, *, stream: bool) -> tuple[int, str]:
    """A model call in a session of its own: status and text of the answer."""
    session = http.post("/sessions").json()
    body = {"messages": [{"role": "user", "content": "Hello."}], "stream": stream}
    answer = http.post(f"/sessions/{session['session_id']}/v1/chat/completions", json=body)
    return answer.status_code, answer.text


def _url(line: str) -> str:
    return str(json.loads(line)["url"]) if line.startswith("{") else re.findall(r"http://[\d.:]+", line)[0]
