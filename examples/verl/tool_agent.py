"""An agent function with a tool: `metadata` has the fields of the row and the items of its `extra_info`."""

import json

import httpx

MULTIPLY = {
    "type": "function",
    "function": {
        "name": "multiply",
        "description": "Multiplies two integers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


def multiply(arguments: str) -> str:
    """Answer one call; whatever the model got wrong goes back to it."""
    try:
        given = json.loads(arguments)
        return str(int(given["a"]) * int(given["b"]))
    except (KeyError, TypeError, ValueError) as error:
        return f"error: {error!r}"


async def run(base_url, prompt, request_kwargs, metadata, api_key, **_more):
    """Call the model until it calls no tool, eight times at most, and reward the right answer."""
    messages = list(prompt)
    headers = {"authorization": f"Bearer {api_key}"}
    async with httpx.AsyncClient(base_url=base_url, headers=headers, timeout=600, trust_env=False) as client:
        for _ in range(8):
            body = {"messages": messages, "tools": [MULTIPLY], **request_kwargs}
            answer = await client.post("/chat/completions", json=body)
            if answer.status_code == 404:  # the session is over: a limit
                break
            messages.append(answer.raise_for_status().json()["choices"][0]["message"])
            calls = messages[-1].get("tool_calls") or []
            for call in calls:
                result = multiply(call["function"]["arguments"])
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
            if not calls:
                break
    return {"reward": float(metadata["answer"] in (messages[-1]["content"] or ""))}
