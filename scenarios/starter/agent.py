# /// script
# requires-python = ">=3.11"
# dependencies = []
# ///
"""Asks the model, tells it when it is wrong, and stops when it is right or after three answers.

Everything that it needs is in its environment; what it prints is in the run directory, `sessions/N/agent.log`. A client
library goes into `dependencies` above, such as "openai==1.109.1".
"""

import json
import os
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

ATTEMPTS = 3


def ask(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The model's next message."""
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages}).encode(),
        {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )
    with urllib.request.urlopen(request) as response:
        message: dict[str, Any] = json.load(response)["choices"][0]["message"]
        return message


def main() -> None:
    """Play one session and leave its result."""
    metadata = json.loads(Path(os.environ["HARNESS_METADATA_FILE"]).read_text(encoding="utf-8"))
    instruction = Path(os.environ["HARNESS_INSTRUCTION_FILE"]).read_text(encoding="utf-8")
    messages: list[dict[str, Any]] = [{"role": "user", "content": instruction}]
    answers: list[str] = []
    while len(answers) < ATTEMPTS:
        try:
            message = ask(messages)
        except urllib.error.HTTPError as refused:
            print("refused:", refused.code, refused.read().decode())
            if refused.code != 404:  # 404 is the end of the session: a limit, an abort
                sys.exit(1)
            break
        answers.append(str(message["content"]).strip())
        print("answer:", answers[-1])
        if answers[-1] == str(len(metadata["word"])):
            break
        # The answer goes back as it came: then the session is one sequence of tokens.
        messages += [message, {"role": "user", "content": "That is wrong. Count again."}]
    Path(os.environ["HARNESS_RESULT_FILE"]).write_text(json.dumps({"answers": answers}), encoding="utf-8")


main()
