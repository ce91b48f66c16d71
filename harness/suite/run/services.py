"""Serve a scenario's engine, with a session server in front, in this process."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from harness.engines.base import TokenProvider
from harness.engines.connect import EngineName, open_engine, programs_of, serving_identity
from harness.engines.teachers import TeacherSpec
from harness.errors import HoldExpired, SessionServerError
from harness.lab.lanes import LaneEngine, LaneSpec
from harness.lab.models import resolve_model
from harness.lab.models.tokenizer_files import SMALL_TOKENIZER, small_tokenizer
from harness.machine.extras import require_package
from harness.rollouts.client.connections import SessionServerAddress
from harness.rollouts.client.session_server import SessionServerClient
from harness.rollouts.manager import SessionManager
from harness.server.http.access import new_admin_token
from harness.server.serving import alone, serve
from harness.server.settings import ServerSettings
from harness.server.store.sqlite import open_store
from harness.suite.faults.seams import KillableLane, Seams, open_seams
from harness.suite.run.model_program import make_model
from harness.suite.scenarios.folder import ScenarioFolder
from harness.tokens.model_family import open_chat_tokenizer
from harness.types import Json
from server_patch.repeat_terminate import RepeatTerminateConfig

_GATE_S = 10.0


class EngineChoice(NamedTuple):
    """An engine. Scenarios with equal choices share one."""

    name: str
    model: str
    script: Path | None
    repeat_guard: RepeatTerminateConfig | None = None
    weights_of: str | None = None
    """Scenario that changes the weights; no other runs on it afterwards."""
    faults_of: str | None = None
    """Scenario with faults; no other runs on it."""
    lanes: tuple[LaneEngine, ...] = ()
    workers: tuple[str, ...] = ()
    """Running engine servers, for the router."""
    has_router: bool = False
    forces_tokens: bool = False
    """True if sessions bring a script."""
    template: Path | None = None
    model_program: Path | None = None
    model_seed: int = 0
    teachers: tuple[TeacherSpec, ...] = ()

    @classmethod
    def of(cls, folder: ScenarioFolder) -> "EngineChoice":
        scenario, spec, services = folder.scenario, folder.scenario.engine, folder.scenario.services
        guard = spec.repeat_guard.config if spec.repeat_guard else None
        weights_of = folder.name if scenario.weights else None
        faults_of, forces = folder.name if scenario.faults else None, scenario.forces_tokens
        template, train = folder.find_template(), scenario.train
        program = folder.file(train.model_program) if train is not None and train.model_program else None
        seed = 0 if program is None else scenario.seed
        teachers = tuple(each.within(folder.directory) for each in scenario.teacher_specs)
        if services is not None:
            lanes = tuple(LaneEngine(group.engine) for group in services.lanes for _ in range(group.count))
            running = [EngineName.parse(each) for each in services.workers]
            workers = tuple(url for each in running for url in each.urls)
            kinds = [*lanes, *(each.kind for each in running for _ in each.urls)]
            name = f"{'router' if services.router else 'lanes'}={','.join(kinds)}"
            common = (name, spec.model, None, guard, weights_of, faults_of)
            more = (services.router, forces, template, program, seed, teachers)
            return cls(*common, lanes, workers, *more)
        named = EngineName.parse(spec.name)
        script = folder.file(spec.script) if spec.script and named.plays_script else None
        lanes = (LaneEngine(named.kind),) if named.needs_server else ()
        return cls(
            *(spec.name, spec.model, script, guard, weights_of, faults_of, lanes, (), False),
            *(forces, template, program, seed, teachers),
        )

    @property
    def key(self) -> str:
        """Name in `lock.json`."""
        guard = None if self.repeat_guard is None else f"repeat_guard={self.repeat_guard.digest()[:12]}"
        weights = None if self.weights_of is None else f"weights_of={self.weights_of}"
        faults = None if self.faults_of is None else f"faults_of={self.faults_of}"
        forced = "forced_tokens" if self.forces_tokens else None
        template = None if self.template is None else f"template={self.template}"
        made = None if self.model_program is None else f"model_program={self.model_program} seed={self.model_seed}"
        taught = ",".join(f"{each.name}={each.engine}:{each.after}" for each in self.teachers)
        teachers = f"teachers={taught}" if taught else None
        parts = (self.name, self.model, self.script, guard, weights, faults, forced, template, made, teachers)
        return " ".join(str(part) for part in parts if part is not None)


@dataclass(frozen=True, slots=True)
class Services(ABC):
    """A session server for rollouts."""

    address: SessionServerAddress
    model: str
    identity: Json
    """Identity of engine and tokenizer, for `lock.json`."""
    engines: list[str]
    """Programs that sample, with versions."""
    model_dir: Path | None
    """Folder of the model's tokenizer, if known."""

    @abstractmethod
    def open_manager(self) -> SessionManager:
        """Return a manager of rollouts."""

    @abstractmethod
    async def drain(self) -> None:
        """Close the run's sessions for good; no new ones begin."""

    @abstractmethod
    async def close_abandoned_sessions(self) -> None:
        """Close sessions that an earlier process left open."""

    @abstractmethod
    async def start_of_server(self) -> str:
        """Return a value that changes when the server restarts. Raises `SessionServerError`."""


@dataclass(frozen=True, slots=True)
class OwnServices(Services):
    """Engine and session server of this run alone."""

    model_dir: Path
    engine: TokenProvider
    seams: Seams | None = None
    """Places to inject faults; None without faults."""

    def open_manager(self) -> SessionManager:
        return SessionManager(self.address.url, admin_token=self.address.admin_token)

    async def drain(self) -> None:
        """See `Services`; the server refuses new sessions."""
        async with SessionServerClient(self.address) as server:
            await server.gate().drain(deadline_s=_GATE_S)

    async def close_abandoned_sessions(self) -> None:
        async with SessionServerClient(self.address) as server:
            for session in await server.sessions():
                await server.delete(session.session_id)
            # The holders died with the earlier process.
            for hold in (await server.gate().report(deadline_s=_GATE_S)).holds:
                try:
                    await server.gate(hold.holder).resume(deadline_s=_GATE_S)
                except SessionServerError as error:
                    if error.code != HoldExpired.code:  # it expired just now
                        raise

    async def start_of_server(self) -> str:
        # Constant: only a fault restarts this server, and the injector knows the affected rollouts.
        return ""


@asynccontextmanager
async def serve_engine(
    choice: EngineChoice, database: Path, say: Callable[[str], None], *, otlp_endpoint: str | None = None
) -> AsyncIterator[OwnServices]:
    """Serve `choice`. Raises `LaneError`, `ModelError`, `TokenizerError` or `EngineError` if it does not start."""
    say(f"starting the {choice.name} engine with {choice.model}")
    model_dir = await find_model(choice)
    chat_tokenizer = await asyncio.to_thread(open_chat_tokenizer, model_dir, template_file=choice.template)
    admin_token = new_admin_token()
    settings = ServerSettings(
        admin_token=admin_token,
        repeat_guard=choice.repeat_guard,
        allow_forced_tokens=choice.forces_tokens,
        otlp_endpoint=otlp_endpoint,
        teachers=choice.teachers,
    )
    async with AsyncExitStack() as stack:
        guard = {} if choice.repeat_guard is None else choice.repeat_guard.to_environ()
        specs = [LaneSpec(engine, model_dir, env=guard) for engine in choice.lanes]
        lanes = [await stack.enter_async_context(KillableLane(spec, say)) for spec in specs]
        kind, urls = _servers_of(choice, lanes)
        network, seams, around = None, None, alone
        if choice.faults_of is not None and urls:
            require_package("aiohttp", "run", "faults before engine servers")
            from harness.suite.faults.network import open_network

            urls, network = await stack.enter_async_context(open_network(urls))  # faults can break it
        engine: TokenProvider
        if choice.has_router:
            require_package("aiohttp", "run", "a router")
            from harness.suite.run.own_router import all_join, open_router

            routed = await stack.enter_async_context(open_router(urls, chat_tokenizer, settings, say))
            engine, around = routed.pool, routed.around
        else:
            engine = open_engine(
                f"{kind}={','.join(urls)}" if urls else choice.name,
                model_dir=model_dir,
                tokenizer=chat_tokenizer.tokenizer,
                script=choice.script,
                repeat_guard=choice.repeat_guard,
            )
        if choice.faults_of is None:
            serving = serve(engine, chat_tokenizer, open_store(database), settings, around=around)
            url = (await stack.enter_async_context(serving)).url
        else:
            opening = open_seams(engine, chat_tokenizer, database, settings, network, lanes=lanes, around=around)
            seams = await stack.enter_async_context(opening)
            url = seams.server.url
        identity = serving_identity(engine.capabilities, chat_tokenizer)
        if choice.has_router:
            await all_join(routed, urls)
            identity["engine"] = choice.name  # not the first worker's name
        address = SessionServerAddress(url, admin_token)
        yield OwnServices(address, engine.capabilities.model, identity, programs_of(engine), model_dir, engine, seams)


def _servers_of(choice: EngineChoice, lanes: Sequence[KillableLane]) -> tuple[str, Sequence[str]]:
    if choice.has_router:
        return "", [*(lane.url for lane in lanes), *choice.workers]  # the router asks the servers for their kinds
    if lanes:
        return choice.lanes[0].protocol, [lane.url for lane in lanes]
    named = EngineName.parse(choice.name)
    return named.kind, named.urls


async def find_model(choice: EngineChoice) -> Path:
    """Return the model's folder, downloaded or made if missing. Raises `ModelError`."""
    if choice.model_program is not None:
        return await make_model(choice.model_program, choice.model_seed)
    return await asyncio.to_thread(model_folder, choice)


def model_folder(choice: EngineChoice) -> Path:
    """Return a named model's folder. An engine that plays a script needs no weights."""
    folder = Path(choice.model).expanduser()
    has_servers = choice.lanes or choice.workers
    if not has_servers and EngineName.parse(choice.name).plays_script:
        if choice.model == SMALL_TOKENIZER:
            return small_tokenizer()
        if folder.is_dir():
            return folder
    return resolve_model(choice.model)
