# /// script
# requires-python = ">=3.11"
# ///
"""A tool loop: asks, does what the model calls for, and asks again; as often as `calls` in the metadata says.

It treats answers as clients in the field do: a server that is gone or fails is asked again, 404 is the end. With
`stubborn` in the metadata it takes nothing for the end: it goes on as often as it was told to, whatever it is
answered, and ignores SIGTERM. Standard library only.
"""

import json
import os
import signal
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

Json = dict[str, Any]
ATTEMPTS = 30
PAUSE_S = 0.2
TIMEOUT_S = 30


class SessionOver(Exception):
    """The server says that there is nothing more to ask for."""


def ask(messages: list[Json], request_kwargs: Json, attempts: int) -> Json:
    """The model's answer; a failure that may pass is asked again, `attempts` requests in all."""
    body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages, **request_kwargs}).encode()
    for attempt in range(attempts):
        try:
            return post(body, attempt)
        except urllib.error.HTTPError as error:
            told = f"{error.code} {error.read().decode(errors='replace')}"
            say(f"refused> {told}")
            if error.code == 404:
                raise SessionOver from error
        except OSError as error:
            say(f"failed> {error!r}")
        time.sleep(PAUSE_S)
    raise SessionOver


def post(body: bytes, attempt: int) -> Json:
    headers = {
        "content-type": "application/json",
        "authorization": f"Bearer {os.environ['OPENAI_API_KEY']}",
        "x-stainless-retry-count": str(attempt),
    }
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    request = urllib.request.Request(url, body, headers)  # noqa: S310  # the harness says where to
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:  # noqa: S310
        return json.load(response)["choices"][0]["message"]


def results(answer: Json) -> list[Json]:
    """The answers of the tools; a model that calls none is asked to."""
    calls = answer.get("tool_calls") or []
    if not calls:
        return [{"role": "user", "content": "Use the tool."}]
    return [{"role": "tool", "tool_call_id": call["id"], "content": "42"} for call in calls]


def say(line: str) -> None:
    print(line, flush=True)


def main() -> None:
    metadata = json.loads(os.environ["HARNESS_METADATA"])
    request_kwargs = json.loads(os.environ.get("HARNESS_REQUEST_KWARGS", "{}"))
    messages: list[Json] = [{"role": "user", "content": Path(os.environ["HARNESS_INSTRUCTION_FILE"]).read_text()}]
    if metadata.get("stubborn"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    answered = refused = 0
    for _ in range(metadata["calls"]):
        try:
            answer = ask(messages, request_kwargs, metadata.get("attempts", ATTEMPTS))
        except SessionOver:
            refused += 1
            if not metadata.get("stubborn"):
                break
        else:
            answered += 1
            say(f"assistant> {json.dumps(answer)}")
            messages += [answer, *results(answer)]
        time.sleep(metadata.get("tool_s", 0))
    result = {"answered": answered, "refused": refused}
    Path(os.environ["HARNESS_RESULT_FILE"]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
