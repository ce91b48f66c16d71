"""Clients of each dialect, as small as they can be: a conversation in the normal form out, a reply in it back."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from harness.types import Json, Message

MAX_TOKENS = 4_000


@dataclass(frozen=True)
class Speaker:
    """How a client of a dialect asks, and what it makes of an answer."""

    name: str
    """The dialect's."""
    path: str
    body: Callable[[Sequence[Message], Sequence[Json]], Json]
    """The body that asks for what comes behind a conversation, with tools."""
    reply: Callable[[Json], Json]
    """The reply in a whole answer."""
    gather: Callable[[Sequence[Json]], Json]
    """The whole answer that the events of a stream add up to."""
    stream_path: str = ""
    """Another path, if the body does not ask for a stream."""

    def __str__(self) -> str:
        return self.name

    def call(self, messages: Sequence[Message], tools: Sequence[Json], *, stream: bool) -> tuple[str, Json]:
        """Path and body of a call."""
        if not self.stream_path:
            return self.path, asks(self, messages, tools, stream=stream)
        return self.stream_path if stream else self.path, asks(self, messages, tools)

    def read(self, text: str, *, stream: bool) -> Json:
        """The reply in an answer that came as `text`."""
        if not stream:
            return self.reply(json.loads(text))
        data = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
        return self.reply(self.gather([json.loads(line) for line in data if line != "[DONE]"]))


# Chat Completions


def _chat_body(messages: Sequence[Message], tools: Sequence[Json]) -> Json:
    return {"messages": list(messages), "tools": list(tools), "max_tokens": MAX_TOKENS}


def _gather_chunks(chunks: Sequence[Json]) -> Json:
    message: Json = {}
    for delta in (choice["delta"] for chunk in chunks for choice in chunk["choices"]):
        for field, value in delta.items():
            if field != "tool_calls":
                message[field] = value if message.get(field) is None else message[field] + value
                continue
            calls = message.setdefault("tool_calls", [])
            for call in value:
                if call["index"] == len(calls):
                    calls.append({name: part for name, part in call.items() if name != "index"})
                else:
                    calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return {"choices": [{"message": message}]}


# Messages


def _messages_body(messages: Sequence[Message], tools: Sequence[Json]) -> Json:
    has_system = messages[0]["role"] == "system"
    spoken: list[Json] = []
    for message in messages[has_system:]:
        role = message["role"] if message["role"] in ("assistant", "system") else "user"
        blocks = list(_blocks(message))
        if spoken and spoken[-1]["role"] == role:
            spoken[-1]["content"] += blocks
        else:
            spoken.append({"role": role, "content": blocks})
    return {
        "messages": spoken,
        "max_tokens": MAX_TOKENS,
        "tools": [_messages_tool(**tool["function"]) for tool in tools],
        **({"system": messages[0]["content"]} if has_system else {}),
    }


def _messages_tool(name: str, description: str, parameters: Json) -> Json:
    return {"name": name, "description": description, "input_schema": parameters}


def _blocks(message: Message) -> list[Json]:
    if message["role"] == "tool":
        return [{"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": message["content"]}]
    blocks: list[Json] = []
    if message.get("reasoning_content"):
        blocks.append({"type": "thinking", "thinking": message["reasoning_content"], "signature": "unknown"})
    if message["content"]:
        blocks.append({"type": "text", "text": message["content"]})
    for call in message.get("tool_calls") or ():
        arguments = json.loads(call["function"]["arguments"])
        blocks.append({"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": arguments})
    return blocks


def _messages_reply(answer: Json) -> Json:
    return _reply_of(
        [block["thinking"] for block in answer["content"] if block["type"] == "thinking"],
        [block["text"] for block in answer["content"] if block["type"] == "text"],
        [
            (block["id"], block["name"], json.dumps(block["input"], ensure_ascii=False))
            for block in answer["content"]
            if block["type"] == "tool_use"
        ],
    )


def gather_blocks(events: Sequence[Json]) -> Json:
    """The message that the events of Messages add up to."""
    message: Json = {}
    for event in (event for event in events if event["type"] != "ping"):
        match event["type"]:
            case "message_start":
                message = event["message"]
            case "content_block_start":
                message["content"].append(event["content_block"])
            case "content_block_delta":
                block, delta = message["content"][event["index"]], event["delta"]
                match delta["type"]:
                    case "input_json_delta":
                        block["input"] = (block["input"] or "") + delta["partial_json"]
                    case "signature_delta":
                        block["signature"] = delta["signature"]
                    case kind:
                        block[kind.removesuffix("_delta")] += delta[kind.removesuffix("_delta")]
            case "content_block_stop":
                block = message["content"][event["index"]]
                if block["type"] == "tool_use":
                    block["input"] = json.loads(block["input"])
            case "message_delta":
                message |= event["delta"] | {"usage": event["usage"]}
            case kind:
                assert kind == "message_stop"
    return message


# Responses


def _responses_body(messages: Sequence[Message], tools: Sequence[Json]) -> Json:
    has_system = messages[0]["role"] == "system"
    return {
        "input": [item for message in messages[has_system:] for item in _items(message)],
        "max_output_tokens": MAX_TOKENS,
        "tools": [{"type": "function", **tool["function"]} for tool in tools],
        **({"instructions": messages[0]["content"]} if has_system else {}),
    }


def _items(message: Message) -> list[Json]:
    if message["role"] == "tool":
        return [{"type": "function_call_output", "call_id": message["tool_call_id"], "output": message["content"]}]
    items: list[Json] = []
    if message.get("reasoning_content"):
        text = {"type": "reasoning_text", "text": message["reasoning_content"]}
        items.append({"type": "reasoning", "id": "rs_1", "summary": [], "content": [text]})
    if message["content"]:
        kind = "output_text" if message["role"] == "assistant" else "input_text"
        part = {"type": kind, "text": message["content"]}
        items.append({"type": "message", "role": message["role"], "content": [part]})
    calls = message.get("tool_calls") or ()
    return items + [{"type": "function_call", "call_id": call["id"], **call["function"]} for call in calls]


def _responses_reply(answer: Json) -> Json:
    items = answer["output"]
    return _reply_of(
        [part["text"] for item in items if item["type"] == "reasoning" for part in item["content"]],
        [part["text"] for item in items if item["type"] == "message" for part in item["content"]],
        [(item["call_id"], item["name"], item["arguments"]) for item in items if item["type"] == "function_call"],
    )


# Gemini


def _gemini_body(messages: Sequence[Message], tools: Sequence[Json]) -> Json:
    has_system = messages[0]["role"] == "system"
    contents: list[Json] = []
    for message in messages[has_system:]:
        role = {"assistant": "model", "tool": "user"}.get(message["role"], message["role"])
        if contents and contents[-1]["role"] == role:
            contents[-1]["parts"] += _gemini_parts(message)
        else:
            contents.append({"role": role, "parts": _gemini_parts(message)})
    declared = [tool["function"] for tool in tools]
    return {
        "contents": contents,
        "generationConfig": {"maxOutputTokens": MAX_TOKENS, "thinkingConfig": {"includeThoughts": True}},
        "tools": [{"functionDeclarations": [_gemini_function(**each) for each in declared]}],
        **({"systemInstruction": {"parts": [{"text": messages[0]["content"]}]}} if has_system else {}),
    }


def _gemini_function(name: str, description: str, parameters: Json) -> Json:
    return {"name": name, "description": description, "parametersJsonSchema": parameters}


def _gemini_parts(message: Message) -> list[Json]:
    if message["role"] == "tool":
        response = {"id": message["tool_call_id"], "response": {"output": message["content"]}}
        return [{"functionResponse": response}]
    parts: list[Json] = []
    if message.get("reasoning_content"):
        parts.append({"text": message["reasoning_content"], "thought": True})
    if message["content"]:
        parts.append({"text": message["content"]})
    for call in message.get("tool_calls") or ():
        args = json.loads(call["function"]["arguments"])
        parts.append({"functionCall": {"id": call["id"], "name": call["function"]["name"], "args": args}})
    return parts


def _gemini_reply(answer: Json) -> Json:
    parts = answer["candidates"][0]["content"]["parts"]
    calls = [part["functionCall"] for part in parts if "functionCall" in part]
    return _reply_of(
        [part["text"] for part in parts if part.get("thought")],
        [part["text"] for part in parts if "text" in part and not part.get("thought")],
        [(call["id"], call["name"], json.dumps(call["args"], ensure_ascii=False)) for call in calls],
    )


def gather_parts(answers: Sequence[Json]) -> Json:
    """The whole answer that the pieces of a Gemini stream add up to; texts of one kind are one part."""
    parts: list[Json] = []
    for part in (part for answer in answers for part in answer["candidates"][0]["content"]["parts"]):
        if parts and "text" in part and "text" in parts[-1] and parts[-1].get("thought") == part.get("thought"):
            parts[-1] |= part | {"text": parts[-1]["text"] + part["text"]}
        else:
            parts.append(dict(part))
    candidate = answers[-1]["candidates"][0]
    content = candidate["content"] | {"parts": [part for part in parts if part.get("text") != "" or part is parts[-1]]}
    return answers[-1] | {"candidates": [candidate | {"content": content}]}


def _reply_of(reasoning: Sequence[str], texts: Sequence[str], calls: Sequence[tuple[str, str, str]]) -> Json:
    reply: Json = {"role": "assistant", "content": "".join(texts)}
    if reasoning:
        reply["reasoning_content"] = "".join(reasoning)
    if calls:
        reply["tool_calls"] = [
            {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
            for call_id, name, arguments in calls
        ]
    return reply


SPEAKERS: tuple[Speaker, ...] = (
    Speaker(
        "openai_chat",
        "/v1/chat/completions",
        _chat_body,
        lambda answer: {**answer["choices"][0]["message"], "content": answer["choices"][0]["message"]["content"] or ""},
        _gather_chunks,
    ),
    Speaker("anthropic_messages", "/v1/messages", _messages_body, _messages_reply, gather_blocks),
    Speaker(
        "openai_responses", "/v1/responses", _responses_body, _responses_reply, lambda events: events[-1]["response"]
    ),
    Speaker(
        "gemini",
        "/v1beta/models/m:generateContent",
        _gemini_body,
        _gemini_reply,
        gather_parts,
        "/v1beta/models/m:streamGenerateContent?alt=sse",
    ),
)
"""One for each dialect that a server speaks; a test compares."""


def asks(speaker: Speaker, messages: Sequence[Message], tools: Sequence[Json], **fields: Any) -> Json:
    """The body of a call, with further fields."""
    return {"model": "m", **speaker.body(messages, tools), **fields}
