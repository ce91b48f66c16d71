"""The agent of the chain's tests, and what its model says: a tool loop on the openai SDK.

Nothing in it waits for a time. Where the order of things matters, agents wait for each other, or for a weight update,
at files: then all of them are in the middle of things, however unlike the pace of engines and processes is.
"""

from harness.types import Json

TOOL: Json = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}

AGENT = '''
# /// script
# requires-python = ">=3.11"
# dependencies = ["openai==3.52.0"]
# ///
"""Asks `calls` times, and does what the model calls for. 404 is the end of its session, and its own.

What the SDK does not ask again by itself, because the server tells it not to, is asked again here.

metadata:
    stubborn        continues after a 404 and ignores SIGTERM
    meets_after     after so many answers it waits
    members         until so many are at the meeting: each counts once when it comes there, and once when it has ended
    meeting         the name of the meeting
    updates         before its last call it waits for so many updates of the weights
"""

import json, os, pathlib, signal, time, uuid
from openai import InternalServerError, NotFoundError, OpenAI

metadata = json.loads(os.environ["HARNESS_METADATA"])
request_kwargs = json.loads(os.environ["HARNESS_REQUEST_KWARGS"])
meeting = pathlib.Path(os.environ["MEETINGS"]) / metadata.get("meeting", "everybody")
meeting.mkdir(parents=True, exist_ok=True)


def meet():
    (meeting / uuid.uuid4().hex).touch()
    while len(list(meeting.iterdir())) < metadata["members"]:
        time.sleep(0.05)


def updates():
    report = pathlib.Path(os.environ.get("WEIGHTS", "none"))
    return len(json.loads(report.read_text())["updates"]) if report.exists() else 0


def ask():
    while True:
        try:
            return client.chat.completions.create(
                model=os.environ["OPENAI_MODEL"], messages=messages, **request_kwargs
            )
        except InternalServerError:
            time.sleep(0.2)


if metadata.get("stubborn"):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
client = OpenAI(max_retries=20, timeout=600)
# Unlike the others' for most of its tokens: a pool serves prompts that begin alike by one engine.
messages = [{"role": "user", "content": f"Add {os.getpid()}. " * 24}]
answered, told, has_met = 0, [], False
for call in range(metadata["calls"]):
    if answered == metadata.get("meets_after") and not has_met:
        has_met = True
        meet()
    while call == metadata["calls"] - 1 and updates() < metadata.get("updates", 0):
        time.sleep(0.05)
    try:
        completion = ask()
    except NotFoundError as error:
        told.append(error.code)
        if not metadata.get("stubborn"):
            break
        time.sleep(0.1)
        continue
    answered += 1
    message = completion.choices[0].message
    messages.append(message.to_dict())
    for call_of_tool in message.tool_calls or []:
        messages.append({"role": "tool", "tool_call_id": call_of_tool.id, "content": "42"})
    if not message.tool_calls:
        messages.append({"role": "user", "content": "Go on."})
pathlib.Path(os.environ["HARNESS_RESULT_FILE"]).write_text(json.dumps({"answered": answered, "told": told}))
(meeting / f"{uuid.uuid4().hex} ended").touch()
'''

CALL = {"text": '<tool_call>{"name":"add"}</tool_call>'}
"""A step that calls the tool."""
CUT = {"text": "I was about to use", "finish": "length"}
"""A step that a limit ends."""
LONG = {"text": "Let me think about that. " * 12}
"""A step that is in flight for a while: more than seventy tokens."""
ENDLESS = {"text": "Let me think about that once more. " * 120}
"""A step that no engine comes to the end of before somebody ends it: nearly a thousand tokens."""
