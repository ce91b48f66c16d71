"""The agent of a run, by miles' contract or a program of ours, and the task of one rollout.

By that contract `base_url` ends in the session's id, without `/v1`, and `prompt` is what the data set has: a text or a
list of messages. Functions are trusted with the whole metadata of a sample, as by miles. A program acts for the model,
which must not read the answer there: it gets `program_metadata`, and so does the session.
"""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from harness.adapters.agents import LoadFunction, find_function, find_script, program_metadata
from harness.adapters.miles.settings import MilesSettings
from harness.adapters.sampling import session_sampling
from harness.adapters.trainer_sessions import MODEL
from harness.rollouts.agents.task import AgentTask, FunctionAgent, ProgramAgent
from harness.types import Json

MilesAgent = Callable[..., Awaitable[dict[str, Any] | None]]
"""`async def run(base_url, prompt, request_kwargs, metadata) -> dict | None`."""


def find_agent(settings: MilesSettings, load: LoadFunction) -> Path | MilesAgent:
    """The script or the function that the options name. Raises `AdapterError` naming the option of one not there."""
    if settings.agent is not None:
        return find_script(settings.agent, "--harness-agent")
    return find_function(settings.agent_function_path, "--custom-agent-function-path", load)


def make_task(
    settings: MilesSettings, agent: ProgramAgent | MilesAgent, sample: Any, sampling_params: Json, workdir: Path
) -> AgentTask:
    """The task of `sample`, one of miles'.

    Raises `AdapterError` for sampling parameters that cannot be kept, and for metadata of a program that are no object.
    """
    sampling = session_sampling(sampling_params)
    place = {"index": sample.index, "group_index": sample.group_index}
    session: Json = {"sampling": sampling}
    if settings.max_seq_len is not None:
        session["limits"] = {"tokens_per_session": settings.max_seq_len}
    if settings.selection is not None:
        session["selection"] = str(settings.selection)
    if settings.matching is not None:
        session["matching"] = list(settings.matching)
    is_program = isinstance(agent, ProgramAgent)
    known = program_metadata(sample.metadata, f"sample {sample.index}: metadata") if is_program else {}
    return AgentTask(
        agent=agent if isinstance(agent, ProgramAgent) else _call_as_miles(agent, settings, sample, sampling),
        prompt=sample.prompt,
        workdir=workdir,
        model=MODEL,
        deadline_s=settings.deadline_s,
        session=session,
        metadata={**known, **place},
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
