# /// script
# requires-python = ">=3.11"
# dependencies = ["httpx==0.28.1", "mcp==2.3.0"]
# ///
"""Offers the model the tools of an MCP server, and answers its calls, until it calls none."""

import asyncio
import json
import os
import sys
from pathlib import Path

import httpx
import mcp

SERVER = mcp.StdioServerParameters(command=sys.executable, args=["tools.py"])


async def main() -> None:
    messages = [{"role": "user", "content": Path(os.environ["HARNESS_INSTRUCTION_FILE"]).read_text()}]
    headers = {"authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    async with mcp.Client(SERVER) as tools, httpx.AsyncClient(headers=headers, timeout=600) as client:
        offered = [
            {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
            for tool in (await tools.list_tools()).tools
        ]
        body = {"messages": messages, "tools": [{"type": "function", "function": tool} for tool in offered]}
        for _ in range(8):
            answer = await client.post(f"{os.environ['OPENAI_BASE_URL']}/chat/completions", json=body)
            if answer.status_code == 404:  # the session is over: a limit, or an abort
                break
            messages.append(answer.raise_for_status().json()["choices"][0]["message"])
            for call in messages[-1].get("tool_calls") or []:
                result = await tools.call_tool(call["function"]["name"], json.loads(call["function"]["arguments"]))
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": result.content[0].text})
            if messages[-1]["role"] == "assistant":
                break
    Path(os.environ["HARNESS_RESULT_FILE"]).write_text(json.dumps({"answer": messages[-1]["content"]}))


asyncio.run(main())
