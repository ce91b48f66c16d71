"""Rollouts of one miles `GenerateState`, in miles' own loop, by a function of miles' contract or a program."""

import asyncio
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from harness.adapters.agents import LoadFunction, Program, find_function, find_program, program_metadata
from harness.adapters.miles.settings import MilesSettings, read_settings
from harness.adapters.sampling import session_sampling
from harness.adapters.trainer_sessions import TrainerSessions
from harness.machine.deadlines import read_end, to_the_end, within
from harness.rollouts.agents.task import AgentFunction, AgentTask, FunctionAgent, ProgramAgent
from harness.rollouts.manager import SessionManager
from harness.samples.rollout import Rollout
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


LOOK_S = 0.05
"""Seconds between polls of `state.aborted`."""


class MilesRollouts:
    """Rollouts of the running loop. Raises `AdapterError`."""

    def __init__(self, args: Any, load: LoadFunction) -> None:
        self.args = args
        self.settings = settings = read_settings(args)
        self.loop = asyncio.get_running_loop()
        self._sessions = TrainerSessions(settings, lambda: find_agent(settings, load))
        self._manager: SessionManager | None = None
        self._running: dict[asyncio.Task[Rollout], AgentTask] = {}
        self._watch: asyncio.Task[None] | None = None
        self._wants_end = asyncio.Event()

    async def open(self) -> ProgramAgent | AgentFunction:
        """Return the agent; raises as `TrainerSessions.open`."""
        self._manager, agent = await self._sessions.open()
        return agent

    async def run(self, task: AgentTask, state: Any) -> Rollout | None:
        """Run `task`. Return None if it was aborted before its session, or could not be ended."""
        assert self._manager is not None
        if state.aborted or self._wants_end.is_set():
            return None
        running = asyncio.create_task(self._manager.run(task), name=f"miles rollout {task.workdir.name}")
        self._running[running] = task
        if self._watch is None or self._watch.done():
            self._watch = asyncio.create_task(self._end_when_aborted(state), name="miles adapter: watch")
        try:
            await asyncio.wait({running, self._watch}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            running.cancel()
            await to_the_end(asyncio.wait({running}))
            raise
        finally:
            running.add_done_callback(read_end)
            running.cancel()  # no effect if it has ended, as it nearly always has
            del self._running[running]
            await self._let_watch_end()
        return running.result() if running.done() and not running.cancelled() else None

    async def end(self) -> None:
        """End every rollout, and start none meanwhile."""
        if self._watch is not None and not self._watch.done():
            self._wants_end.set()
            await asyncio.wait({self._watch})

    async def close(self) -> None:
        """End every rollout and close everything. Idempotent."""
        await self.end()
        await self._sessions.close()

    # To end a step, miles sets `state.aborted` and aborts every engine request. A cut turn would look like one of a
    # weight update and continue. So the state is polled; on an abort, sessions drain, requests end and agents stop. No
    # gate moves, so other runs on the server continue.
    async def _end_when_aborted(self, state: Any) -> None:
        while not state.aborted and not await within(LOOK_S, self._wants_end.wait()):
            pass
        self._wants_end.set()
        try:
            await self._end_all()
        finally:
            self._wants_end.clear()

    async def _end_all(self) -> None:
        assert self._manager is not None
        sessions = {id(task): session_id for session_id, task in self._manager.live.items()}
        for running, task in self._running.items():
            if id(task) not in sessions:
                running.cancel()  # it waits for its session
        ended = [sessions[id(task)] for task in self._running.values() if id(task) in sessions]
        await self._manager.abort(list(self._running), sessions=ended)

    async def _let_watch_end(self) -> None:
        # The last rollout ends the watch, but an abort runs to its end first.
        watch = self._watch
        if self._running or watch is None:
            return
        if not self._wants_end.is_set():
            self._watch = None  # a rollout that begins meanwhile gets a watch of its own
            watch.cancel()
        await to_the_end(asyncio.wait({watch}))
