"""Agent of Harbor that plays another one on a session. Only Harbor imports this module, because its base is there."""

import asyncio
import os
from functools import partialmethod
from typing import Any

from harbor.agents.base import BaseAgent
from harbor.agents.factory import AgentFactory
from harbor.models.trial.config import AgentConfig

from harness.adapters.harbor.details import context_fields, outcome_of
from harness.adapters.trainer_sessions import ADMIN_TOKEN_VARIABLE, MODEL
from harness.errors import SessionServerError
from harness.machine.deadlines import to_the_end
from harness.rollouts.agents.agent_environment import client_variables
from harness.rollouts.client.connections import SessionServerAddress, server_url
from harness.rollouts.client.session_server import Deadlines, SessionHandle, SessionServerClient, read_record
from harness.samples.rollout import OutcomeKind
from harness.sessions.lifecycle import RolloutEnd
from harness.types import Json

_DEADLINES = Deadlines(read_s=20.0, end_s=5.0)  # Harbor waits for a cancelled trial


class SessionAgent(BaseAgent):  # type: ignore[misc]  # Harbor has an environment of its own
    """An agent for the `import_path` of Harbor.

    `agent` is the name or `module:Class` of the agent to play, which gets `options`. Sandboxes reach the session server
    at `session_server`, too; `HARNESS_ADMIN_TOKEN` holds its token. The rest is Harbor's.
    """

    def __init__(self, *, agent: str, session_server: str, model_name: str | None = None, **options: Any) -> None:
        env = dict(options.pop("extra_env", None) or {})
        own = {name: options[name] for name in ("logger", "mcp_servers", "skip_model_parsing") if name in options}
        super().__init__(options["logs_dir"], model_name, extra_env=env, **own)
        self._agent, self._options = agent, options
        self._server = SessionServerAddress(server_url(session_server), os.environ.get(ADMIN_TOKEN_VARIABLE))
        self._session: SessionHandle | None = None
        self._known: Json = {}  # fields of the context, after a run
        self._is_aborted = False
        self._make_agent({})  # Harbor asks for its capabilities before the setup

    @classmethod
    def preflight(cls, kwargs: dict[str, Any] | None = None, env: dict[str, str] | None = None) -> None:
        """Check the agent's options. Raises as the agent does."""
        options = {**(kwargs or {})}
        options.pop("session_server", None)
        AgentFactory.get_agent_class_from_config(AgentConfig(name=options.pop("agent", None))).preflight(options, env)

    @staticmethod
    def name() -> str:
        return "session-agent"

    def version(self) -> Any:
        return self._played.version()

    def to_agent_info(self) -> Any:
        return self._played.to_agent_info()

    @property
    def extra_env(self) -> Any:
        return self._played.extra_env

    async def set_web_tools_disabled(self, disabled: bool, environment: Any) -> None:
        if not self._is_aborted:
            await self._require_session()  # called before each step, for the agent of its session
            await self._played.set_web_tools_disabled(disabled, environment)

    async def setup(self, environment: Any) -> None:
        """Create a session and set the agent up. Raises `SessionServerError`, and as the agent does."""
        session = await self._require_session()
        try:
            with environment.scoped_exec_env(self.extra_env):
                await self._played.setup(environment)
        except (Exception, asyncio.CancelledError) as error:
            await to_the_end(self._close(session, error))
            raise

    async def run(self, instruction: str, environment: Any, context: Any, *, verb: str = "run") -> None:
        """Play the agent. Raises as the agent does, unless its session was aborted."""
        if self._is_aborted:  # in an earlier step of the task
            context.metadata = {"aborted": True}
            return
        session = await self._require_session()
        failure: BaseException | None = None
        try:
            with environment.scoped_exec_env(self.extra_env):
                await getattr(self._played, verb)(instruction=instruction, environment=environment, context=context)
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001  # raised below, with the tokens read
            failure = error
        await to_the_end(self._close(session, failure))
        if not context.is_empty():  # else Harbor calls `populate_context_post_run`
            self._fill(context)
        if failure is not None and not (isinstance(failure, Exception) and self._is_aborted):
            raise failure

    resume = partialmethod(run, verb="resume")
    load = partialmethod(run, verb="load")

    def populate_context_post_run(self, context: Any) -> None:
        """Fill what the agent reads from its logs, then what the session knows."""
        try:
            self._played.populate_context_post_run(context)
        except Exception:
            if not self._is_aborted:
                raise
        finally:
            self._fill(context)

    async def _require_session(self) -> SessionHandle:
        # Each step of a task has its own, the first step's since the setup.
        if self._session is None:
            self._known = {}
            async with SessionServerClient(self._server) as client:
                self._session = await client.create({"metadata": {"trial": self.session_id}})
            self._make_agent(client_variables(self._session, self._parsed_model_name or MODEL))
        return self._session

    async def _close(self, session: SessionHandle, failure: BaseException | None) -> None:
        self._session = None
        async with SessionServerClient(self._server, deadlines=_DEADLINES) as client:
            record = await read_record(client, session.session_id, end_s=_DEADLINES.end_s)
            outcome = outcome_of(failure, record)
            self._known = context_fields(session.session_id, outcome, record)
            self._is_aborted = outcome.kind is OutcomeKind.DRAINED
            try:
                await client.delete(session.session_id, RolloutEnd(str(outcome.kind), outcome.detail[:300]))
            except SessionServerError as error:
                self.logger.warning("session %s was not deleted: %s", session.session_id, error.message)

    def _make_agent(self, variables: dict[str, str]) -> None:
        config = AgentConfig(name=self._agent, model_name=self.model_name, env={**self._extra_env, **variables})
        self._played = AgentFactory.create_agent_from_config(config, **self._options)
        self._played.session_id, self._played.context_id = self.session_id, self.context_id
        self.capabilities = self._played.capabilities

    def _fill(self, context: Any) -> None:
        own = context.metadata or {}
        for name, value in self._known.items():
            setattr(context, name, {**own, **value} if name == "metadata" else value)
