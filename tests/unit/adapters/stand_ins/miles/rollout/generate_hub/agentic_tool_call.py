"""miles' own generate function for agents: a session, the agent, one blob of samples."""

import json
from copy import deepcopy

import httpx
from safetensors.numpy import load

from miles.rollout.base_types import GenerateFnOutput
from miles.utils.misc import load_function
from miles.utils.types import Sample


async def generate(input):  # noqa: A002  # as miles has it
    """One sample; one without a recorded model call is aborted."""
    args = input.args
    server = f"http://{args.session_server_ip}:{args.session_server_ports[0]}"
    async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
        session_id = (await client.post(f"{server}/sessions", json={})).json()["session_id"]
        url = f"{server}/sessions/{session_id}"
        told = await load_function(args.custom_agent_function_path)(
            base_url=url,
            prompt=input.sample.prompt,
            request_kwargs={"max_tokens": input.sampling_params["max_new_tokens"]},
            metadata={**input.sample.metadata, "session_server_id": server.removeprefix("http://")},
        )
        answer = await client.post(f"{url}/samples", json={"max_seq_len": getattr(args, "max_seq_len", None)})
        answer.raise_for_status()
        await client.delete(url)
    tensors = load(answer.content)
    samples = json.loads(tensors["_samples_meta"].tobytes())["samples"]
    made = deepcopy(input.sample)
    if not samples:
        made.status = Sample.Status.ABORTED
        return GenerateFnOutput(samples=made)
    for name in ("tokens", "loss_mask", "rollout_log_probs"):
        setattr(made, name, tensors[f"{name}.0"].tolist())
    made.response_length, made.response = samples[0]["response_length"], samples[0]["response"]
    made.status = Sample.Status(samples[0]["status"])
    made.metadata.update(told or {})
    return GenerateFnOutput(samples=made)
