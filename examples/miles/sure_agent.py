"""An agent by miles' contract; it also runs under miles' own `agentic_tool_call.generate`."""

import httpx

QUESTIONS = ["Are you sure?", "Then say the number alone."]


async def run(base_url, prompt, request_kwargs, metadata):
    """Asks, asks again, and rewards an answer that names the number of the data set."""
    messages = list(prompt)
    headers = {"authorization": f"Bearer {metadata.get('session_api_key', 'none')}"}
    async with httpx.AsyncClient(base_url=base_url, headers=headers, timeout=600, trust_env=False) as client:
        for question in [None, *QUESTIONS]:
            if question is not None:
                messages.append({"role": "user", "content": question})
            body = {"model": "policy", "messages": messages, **request_kwargs}
            answer = await client.post("/v1/chat/completions", json=body)
            if answer.status_code == 404:  # the session is over: a limit, or an abort
                break
            answer.raise_for_status()
            messages.append(answer.json()["choices"][0]["message"])
    return {"reward": float(metadata["answer"] in messages[-1]["content"])}
