"""An agent function: `base_url` ends in `/v1`, `metadata` is the row of the data set."""

import httpx

QUESTIONS = ["Are you sure?", "Then say the number alone."]


async def run(base_url, prompt, request_kwargs, metadata, api_key, **_more):
    """Asks, asks again, and rewards an answer that names the number of the data set."""
    messages = list(prompt)
    headers = {"authorization": f"Bearer {api_key}"}
    async with httpx.AsyncClient(base_url=base_url, headers=headers, timeout=600, trust_env=False) as client:
        for question in [None, *QUESTIONS]:
            if question is not None:
                messages.append({"role": "user", "content": question})
            answer = await client.post("/chat/completions", json={"messages": messages, **request_kwargs})
            if answer.status_code == 404:  # the session is over: a limit
                break
            answer.raise_for_status()
            messages.append(answer.json()["choices"][0]["message"])
    return {"reward": float(metadata["answer"] in messages[-1]["content"])}
