"""`harness train`: optimizer steps on a scenario's rollouts, in one run directory, over any number of starts.

    serve the engine, open the learner, continue from the last committed step
    for every step: collect and pack it while the learner trains, commit it, publish its weights

Policy version n follows n steps. Sessions survive updates when rollouts continue into the next step.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from pathlib import Path

import msgspec

from harness.engines.connect import EngineName
from harness.lab.lanes import LaneEngine
from harness.machine.deadlines import to_the_end
from harness.machine.disk import disk_failures
from harness.rollouts.client.session_server import SessionServerClient
from harness.rollouts.control.weights import WeightUpdater
from harness.server.telemetry.metrics import FigureGauges
from harness.suite.record.rundir import RunDirectory, check_same_engine, note_engine, note_start, read_lock
from harness.suite.run.audited import auditing, read_audit
from harness.suite.run.interrupts import Interrupts, one_error
from harness.suite.run.open_run import OpenedRun
from harness.suite.run.report import audit_figures
from harness.suite.run.services import EngineChoice, OwnServices, find_model, serve_engine
from harness.suite.scenarios.folder import ScenarioFolder
from harness.suite.scenarios.train_spec import TrainSpec
from harness.suite.training.journal import Checkpoints, TrainingJournal
from harness.suite.training.report import StepFile, TrainReport, read_telemetry
from harness.suite.training.training_pipeline import open_pipeline
from harness.training.collector.record.step_table import StepTable
from harness.training.learner.learner import Learner, ScriptedLearner
from harness.training.step_stores import ReportStep, StepStore, report_steps

WEIGHTS_SECONDS = "weights/seconds"
"""Duration from the first byte written to the last gate opened."""


class Publication:
    """Publishes version n, after n steps, as safetensors. Appends to `weights.jsonl`."""

    def __init__(self, services: OwnServices, checkpoints: Checkpoints, directory: RunDirectory) -> None:
        self._services = services
        self._updater = WeightUpdater([services.engine], [services.address])
        self._checkpoints = checkpoints
        self._updates = StepFile(directory.path / "weights.jsonl")

    async def publish(self, learner: Learner) -> dict[str, float]:
        """Publish the weights. Returns the figures. Raises `EngineError`, `LearnerError` or `StoreError`."""
        began = asyncio.get_running_loop().time()
        saving = asyncio.to_thread(self._checkpoints.save_model, learner)
        folder = await to_the_end(saving)  # cannot stop the thread: keep the run's locks until it ends
        async with SessionServerClient(self._services.address) as server:
            live = len(await server.sessions())
        async with self._updater.update(learner.step) as update:
            await update.apply(folder)
        await asyncio.to_thread(self._checkpoints.remove_models, but=learner.step)
        figures = {
            **update.report.telemetry(),
            "weights/live_sessions": live,
            "weights/problems": len(update.report.problems),
            WEIGHTS_SECONDS: asyncio.get_running_loop().time() - began,
        }
        await asyncio.to_thread(self._updates.append, msgspec.json.encode(figures))
        return figures


@dataclass(frozen=True, slots=True)
class TrainRun:
    """A training run up to `steps` committed steps. Executing it again continues it."""

    opened: OpenedRun
    steps: int
    say: Callable[[str], None]
    interrupts: Interrupts
    metrics_port: int | None = None
    """Port for Prometheus; 0 is any free port."""
    otlp_endpoint: str | None = None
    stores: Sequence[StepStore] = ()
    around_learner: Callable[[Learner], Learner] | None = None

    async def execute(self) -> TrainReport:
        """Train until all steps are committed or the user stops it. Raises `HarnessError`."""
        began, directory = time.monotonic(), self.opened.directory
        with directory.occupy(), StepTable(directory.database, self._train.keep_steps) as table, one_error():
            # A process that died after the last commit may not have saved the last weights.
            if table.position.step < self.steps or not directory.is_complete:
                await self._go_on(table)
            report = TrainReport(
                directory=directory.path,
                wanted=self.steps,
                telemetry=read_telemetry(directory, table.position.step),
                ledger=table.close_books(),
                seconds=time.monotonic() - began,
                audit=read_audit(directory),
            )
            if report.is_complete:
                directory.write_json(directory.result, report.to_json())
            return report

    @property
    def _folder(self) -> ScenarioFolder:
        [folder] = self.opened.selection.folders
        return folder

    @property
    def _train(self) -> TrainSpec:
        train = self._folder.scenario.train
        assert train is not None, "a training run is of a scenario with [train]"
        return train

    async def _go_on(self, table: StepTable) -> None:
        directory = self.opened.directory
        async with AsyncExitStack() as stack:
            gauges = None if self.metrics_port is None else stack.enter_context(FigureGauges(self.metrics_port))
            if gauges is not None:
                self.say(f"figures at http://127.0.0.1:{gauges.port}/metrics")
            async with self.interrupts.until_request():  # making a model and starting a server takes minutes
                choice = await choose_engine(self._folder)
                async with asyncio.TaskGroup() as opening:
                    opening_learner = opening.create_task(open_learner(choice, self._train))
                    serving = serve_engine(choice, directory.database, self.say, otlp_endpoint=self.otlp_endpoint)
                    services = await stack.enter_async_context(serving)
                learner = opening_learner.result()
                learner = learner if self.around_learner is None else self.around_learner(learner)
            if self.interrupts.is_requested:
                return
            lock = read_lock(directory.lock)
            check_same_engine(lock["digests"].setdefault("engine", services.identity), services.identity)
            lock = note_engine(note_start(lock), choice.key, services.engines, services.model_dir)
            directory.write_json(directory.lock, lock)
            await services.close_abandoned_sessions()
            stores = ExitStack()
            stack.push_async_callback(asyncio.to_thread, stores.close)
            report = await asyncio.to_thread(stores.enter_context, report_steps(self.stores, directory.path))
            with disk_failures(directory.result):
                directory.result.unlink(missing_ok=True)  # reports fewer steps

            async def drain() -> None:
                self.say("stopping after this step; Ctrl+C again ends it now")

            await self.interrupts.guard(self._run_steps(services, learner, table, gauges, report), drain=drain)

    async def _run_steps(
        self, services: OwnServices, learner: Learner, table: StepTable, gauges: FigureGauges | None, report: ReportStep
    ) -> None:
        directory, train = self.opened.directory, self._train
        checkpoints = Checkpoints(directory, train.checkpoints.every)
        publication = Publication(services, checkpoints, directory)
        journal = TrainingJournal(
            directory,
            table,
            checkpoints,
            seed=self._folder.scenario.seed,
            packing_length=train.packing.length,
            is_guarded=bool(services.identity["repeat_guard"]),
        )
        await asyncio.to_thread(journal.restore, learner)
        if learner.step:
            await publication.publish(learner)
            # The previous process may have died between publishing and forgetting.
            await asyncio.to_thread(table.forget)  # a dead process may have left that to be done
        auditing_run = auditing([self._folder], directory, self.say, lambda: self.interrupts.is_requested)
        async with auditing_run as audit, AsyncExitStack() as stack:
            opening = open_pipeline(
                *(self._folder, train, services, learner),
                table=table,
                journal=journal,
                last_step=self.steps - 1,
                audit=audit,
            )
            pipeline, tasks = await stack.enter_async_context(opening)
            for step in range(learner.step, self.steps):
                if self.interrupts.is_requested:
                    return
                self.say(f"collecting and training step {step + 1} of {self.steps}")
                trained = await pipeline.run(step, version=step)
                figures = await journal.commit(trained, learner, audit_figures(None if audit is None else audit.json))
                figures |= await publication.publish(learner)
                await asyncio.to_thread(table.forget)
                carried = {group.index for group in trained.packed.collected.carried}
                await asyncio.to_thread(tasks.workdirs.forget, learner.step - train.keep_steps, carried)
                self.say(describe_step(figures, self.steps))
                await asyncio.to_thread(report, learner.step, figures)
                if gauges is not None:
                    gauges.set(figures)


def describe_step(figures: Mapping[str, float], steps: int) -> str:
    learn_s = figures["time/forward_s"] + figures["time/finish_s"]
    return (
        f"step {figures['global_step'] + 1:.0f}/{steps}  reward {figures['rollout/reward_mean']:.3f}"
        f"  {figures['train/micro_steps']:.0f} packs, {figures['train/trained_tokens']:,.0f} tokens"
        f"  {figures['time/step_s']:.2f} s: generate {figures['time/rollout_generate_s']:.2f}, learn {learn_s:.2f};"
        f" weights {figures[WEIGHTS_SECONDS]:.2f}"
    )


async def choose_engine(folder: ScenarioFolder) -> EngineChoice:
    """Return the engine, and run its model program, if any. Raises `ModelError`."""
    choice = EngineChoice.of(folder)
    if choice.model_program is not None:
        choice = choice._replace(model=str(await find_model(choice)), model_program=None)
    # Sharing the interpreter and torch's threads with the learner would prevent overlap: use another process.
    if choice.name == LaneEngine.LOCAL:
        choice = choice._replace(name=f"lanes={LaneEngine.LOCAL}", lanes=(LaneEngine.LOCAL,))
    return choice


async def open_learner(choice: EngineChoice, train: TrainSpec) -> Learner:
    """Open a learner with the weights of `choice`, scripted for a scripted engine. Raises `LearnerError`."""
    if not choice.lanes and not choice.workers and EngineName.parse(choice.name).plays_script:
        return ScriptedLearner()
    model_dir = await find_model(choice)
    return await asyncio.to_thread(_open_torch_learner, model_dir, train)


def _open_torch_learner(model_dir: Path, train: TrainSpec) -> Learner:
    from harness.training.learner.learner import LossKind, LossSettings, OptimizerSettings
    from harness.training.learner.torch_learner import TorchLearner

    loss, optimizer = train.loss, train.optimizer
    return TorchLearner.open(
        model_dir,
        LossSettings(LossKind(loss.name), loss.clip_low, loss.clip_high, loss.weight_cap, train.teachers),
        OptimizerSettings(**optimizer.model_dump()),
    )
