"""The agent of a run, a function by miles' contract or a program of ours."""

from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from harness.adapters.agents import LoadFunction, Program, find_function, find_program, program_metadata
from harness.adapters.miles.settings import MilesSettings
from harness.adapters.sampling import session_sampling
from harness.rollouts.agents.task import AgentFunction, AgentTask, FunctionAgent, ProgramAgent
from harness.sessions.session_config import Recorded
from harness.types import Json


def find_agent(settings: MilesSettings, load: LoadFunction) -> Program | AgentFunction:
    """Return the program or function. Raises `AdapterError` naming the option."""
    if settings.agent is not None:
        return find_program(settings.agent, "--harness-agent")
    return find_function(settings.agent_function_path, "--custom-agent-function-path", load)


def make_task(
    settings: MilesSettings, agent: ProgramAgent | AgentFunction, sample: Any, sampling_params: Json, workdir: Path
) -> AgentTask:
    """Make a sample's task. Raises `AdapterError` for unsupported parameters or metadata."""
    params = dict(sampling_params)
    if Recorded.SAMPLING_MASK in settings.record and params.get("custom_params") == {"return_top_p_token_ids": True}:
        del params["custom_params"]  # slime's request for masks, in the words of its own SGLang
    sampling = session_sampling(params)
    place = {"index": sample.index, "group_index": sample.group_index}
    if isinstance(agent, ProgramAgent):
        known = program_metadata(sample.metadata, f"sample {sample.index}: metadata")
        player: ProgramAgent | FunctionAgent = agent
    else:
        known, player = {}, _call_as_miles(agent, settings, sample, sampling)
    return settings.make_task(
        player,
        sample.prompt,
        workdir,
        {**known, **place},
        sampling=sampling,
        most_tokens=settings.max_seq_len,
        selection=settings.selection,
    )


def _call_as_miles(agent: AgentFunction, settings: MilesSettings, sample: Any, sampling: Json) -> FunctionAgent:
    # miles has no session keys, so the key travels in the metadata.
    bound = {} if settings.max_seq_len is None else {"max_seq_len": settings.max_seq_len}

    # By miles' contract `base_url` ends in the session's id, without `/v1`, and a function gets all metadata.
    async def run(*, base_url: str, api_key: str, **_ours: Any) -> dict[str, Any] | None:
        place = {"session_server_id": urlsplit(base_url).netloc, "session_api_key": api_key}
        return await agent(
            base_url=base_url.removesuffix("/v1"),
            prompt=sample.prompt,
            request_kwargs=dict(sampling),
            metadata={**sample.metadata, **bound, **place},
        )

    return FunctionAgent(settings.agent_function_path or "agent", run)
