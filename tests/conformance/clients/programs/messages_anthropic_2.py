# /// script
# requires-python = ">=3.11"
# dependencies = ["anthropic==2.12.0"]
# ///
"""Messages with the stream helper of the anthropic SDK 2; its last line is the message for each question."""

import json
import os

from anthropic import Anthropic

TOOLS = [{"name": name, "input_schema": {"type": "object"}} for name in ("add", "patch")]


def main() -> None:
    """Ask as often as the environment says."""
    client, answers = Anthropic(), []
    for number in range(int(os.environ["QUESTIONS"])):
        question = {"role": "user", "content": f"Question {number}"}
        with client.messages.stream(model="m", max_tokens=2_000, messages=[question], tools=TOOLS) as stream:
            text = "".join(stream.text_stream)
            message = stream.get_final_message()
        answers.append({"text": text, "message": message.to_dict()})
    print(json.dumps(answers), flush=True)


if __name__ == "__main__":
    main()
