"""The task of one rollout: an agent by miles' contract, or a program of ours, and the session it runs on. Pure.

By that contract `base_url` ends in the session's id, without `/v1`, and `prompt` is what the data set has: a text or a
list of messages.
"""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from harness.adapters.miles.sampling import session_sampling
from harness.adapters.miles.settings import MilesSettings
from harness.rollouts.agents.task import AgentTask, FunctionAgent, ProgramAgent
from harness.types import Json

MODEL = "policy"
"""The model's name for clients that have to state one."""

MilesAgent = Callable[..., Awaitable[dict[str, Any] | None]]
"""`async def run(base_url, prompt, request_kwargs, metadata) -> dict | None`."""


def make_task(
    settings: MilesSettings, agent: ProgramAgent | MilesAgent, sample: Any, sampling_params: Json, workdir: Path
) -> AgentTask:
    """The task of `sample`, one of miles'. Raises `AdapterError` for sampling parameters that cannot be kept."""
    sampling = session_sampling(sampling_params)
    place = {"index": sample.index, "group_index": sample.group_index}
    limits = {} if settings.max_seq_len is None else {"tokens_per_session": settings.max_seq_len}
    session = {
        "sampling": sampling,
        "limits": limits,
        "selection": str(settings.selection),
        "matching": list(settings.matching),
    }
    return AgentTask(
        agent=agent if isinstance(agent, ProgramAgent) else _call_as_miles(agent, settings, sample, sampling),
        prompt=sample.prompt,
        workdir=workdir,
        model=MODEL,
        deadline_s=settings.deadline_s,
        session=session,
        metadata={**sample.metadata, **place} if isinstance(agent, ProgramAgent) else place,
    )


def _call_as_miles(agent: MilesAgent, settings: MilesSettings, sample: Any, sampling: Json) -> FunctionAgent:
    """`agent`, called the way miles calls it; the key of the session is in the metadata, since miles knows none."""
    bound = {} if settings.max_seq_len is None else {"max_seq_len": settings.max_seq_len}

    async def run(*, base_url: str, api_key: str, **_ours: Any) -> dict[str, Any] | None:
        place = {"session_server_id": urlsplit(base_url).netloc, "session_api_key": api_key}
        return await agent(
            base_url=base_url.removesuffix("/v1"),
            prompt=sample.prompt,
            request_kwargs=dict(sampling),
            metadata={**sample.metadata, **bound, **place},
        )

    return FunctionAgent(settings.agent_function_path or "agent", run)
