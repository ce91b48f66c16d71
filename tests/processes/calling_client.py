"""What an agent and a program that the model wrote have in common: the same client, system prompt and tool.

Standard library only, and imported by scripts beside it: a program of the model has nothing but a shell.
"""

import json
import os
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

HEADERS = {
    "authorization": f"Bearer {os.environ.get('OPENAI_API_KEY', '')}",
    "content-type": "application/json",
    "user-agent": "OpenAI/Python 2.6.1",
    "x-stainless-lang": "python",
    "x-stainless-package-version": "2.6.1",
    "x-stainless-retry-count": "0",
}
SYSTEM = {"role": "system", "content": "You have a shell."}
TOOL = {
    "type": "function",
    "function": {
        "name": "run_shell",
        "description": "Run a command line.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}


class CallingClient:
    """One keep-alive connection to the session of the environment."""

    def __init__(self) -> None:
        url = urlsplit(os.environ["OPENAI_BASE_URL"])
        self._path = f"{url.path}/chat/completions"
        self._http = HTTPConnection(url.hostname or "", url.port, timeout=60)

    def ask(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        """The answer to `messages`, which it is added to."""
        body = {"model": "m", "messages": [SYSTEM, *messages], "tools": [TOOL]}
        self._http.request("POST", self._path, json.dumps(body), HEADERS)
        answer = self._http.getresponse()
        text = answer.read().decode()
        if answer.status != 200:
            raise SystemExit(f"{answer.status} {text}")
        message: dict[str, Any] = json.loads(text)["choices"][0]["message"]
        messages.append(message)
        return message

    def close(self) -> None:
        """Have a new connection for the next call."""
        self._http.close()
