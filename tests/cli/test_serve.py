"""`harness serve` is a session server of its own, until somebody stops it."""

import json
import re
import signal
from pathlib import Path

import httpx
import pytest
from toy_model import write_toy_model

from tests.suite.builders import start_harness, wait


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_sessions_are_served_until_a_signal(tmp_path: Path, number: signal.Signals):
    """On the port it was given, or any; the store keeps them."""
    toy = write_toy_model(tmp_path / "toy")
    store = tmp_path / "sessions.db"
    process = start_harness("serve", "--engine", "scripted", "--tokenizer", toy, "--port", "0", "--store", store)
    assert process.stderr is not None
    url = next(_url(line) for line in process.stderr if "server_started" in line)
    with httpx.Client(base_url=url) as http:
        session = http.post("/sessions").json()
        answer = http.post(
            f"/sessions/{session['session_id']}/v1/chat/completions",
            json={"messages": [{"role": "user", "content": "Hello."}]},
        ).json()
    process.send_signal(number)

    assert wait(process).code == 0
    assert answer["choices"][0]["message"]["content"] == "Understood."
    assert store.is_file()


def _url(line: str) -> str:
    return str(json.loads(line)["url"]) if line.startswith("{") else re.findall(r"http://[\d.:]+", line)[0]
