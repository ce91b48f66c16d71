"""Plays the game over OpenAI's chat completions: an agent that is a function of this file."""

from typing import Any

import aiohttp

from .game import TOOLS, Game, route_of

SESSION_OVER = 404


async def run(
    base_url: str, prompt: str, request_kwargs: dict[str, Any], metadata: dict[str, Any], *, api_key: str, **_: object
) -> dict[str, Any]:
    """The rooms that the model went to, in the game of this `group_seed`."""
    game = Game(route_of(metadata["group_seed"]))
    messages = [{"role": "system", "content": prompt.strip()}, {"role": "user", "content": game.opening()}]
    async with aiohttp.ClientSession(headers={"authorization": f"Bearer {api_key}"}) as client:
        while not game.is_over:
            body = {**request_kwargs, "tools": TOOLS, "messages": messages}
            async with client.post(f"{base_url}/chat/completions", json=body) as response:
                if response.status == SESSION_OVER:
                    break
                response.raise_for_status()
                answer = (await response.json())["choices"][0]["message"]
            messages.append(answer)
            result = game.go(answer)
            if not game.is_over:
                messages.append({"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": result})
    return {"walked": game.walked}
