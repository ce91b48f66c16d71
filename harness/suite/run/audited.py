"""Audit of a run: some of its rollouts while it continues, or all of them afterwards. `audit.json` keeps the report."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from harness.decoding import read_json
from harness.engines.base import TokenProvider
from harness.errors import HarnessError, MalformedRequest, RunError, TokenizerError
from harness.machine.deadlines import to_the_end
from harness.samples.versions import version_of
from harness.server.store.sqlite import list_sessions, read_record, read_rows
from harness.suite.record.config import RunConfig
from harness.suite.record.rollout_table import read_rollouts
from harness.suite.record.rundir import RunDirectory, read_lock
from harness.suite.scenarios.folder import ScenarioFolder, load_scenario
from harness.tokens.chat_tokenizer import ChatTokenizer
from harness.tokens.model_family import open_chat_tokenizer
from harness.types import Json, Logprobs

if TYPE_CHECKING:  # they import torch
    from harness.training.audit.audit import Audit, AuditReport
    from harness.training.audit.branches import AuditedBranch

_SEEDS = 1 << 16
_MOST_SESSIONS = 128
_ALARM = 0.05  # nats in the mean; bfloat16 differs by less
_SCORE_S = 60.0
_SILENCE_S = 5.0


def find_weights(directory: RunDirectory) -> dict[int, Path]:
    """Return the folders of a run's weights that are still there, by version."""
    # One without a file is being written.
    folders = {file.parent for file in directory.checkpoints.glob("*/*.safetensors")}
    found = {int(each.name): each for each in folders if each.name.isdecimal()}
    models = [*read_lock(directory.lock).get("tokenizers", {}).values()]
    return {0: Path(models[0]), **found} if len(models) == 1 and Path(models[0]).is_dir() else found


def find_template(directory: RunDirectory, weights: Mapping[int, Path]) -> ChatTokenizer | None:
    """Return the trainer's chat tokenizer: its newest weights' tokenizer with the run's template; None if gone."""
    with suppress(HarnessError):
        entries = RunConfig.load(directory.config).scenarios
        folders = [replace(load_scenario(Path(each.directory)), scenario=each.scenario) for each in entries]
        [template] = {folder.find_template() for folder in folders}
        return open_template(weights, template)
    return None


def open_template(weights: Mapping[int, Path], template: Path | None = None) -> ChatTokenizer | None:
    # Folders of later versions may hold weights alone.
    for version in sorted(weights, reverse=True):
        with suppress(TokenizerError, MalformedRequest, OSError):
            return open_chat_tokenizer(weights[version], template_file=template)
    return None


def audit_sessions(
    store: Path,
    session_ids: Sequence[str],
    weights: Mapping[int, Path],
    template: ChatTokenizer | None,
    *,
    say: Callable[[str], None] = lambda _: None,
    is_stopped: Callable[[], bool] = lambda: False,
    again: Mapping[str, Sequence[Logprobs]] | None = None,
) -> "AuditReport":
    """Audit sessions of a store, or some from first to last if `session_ids` is empty, against the newest `weights`.

    `again`: logprobs of an engine that scored branches of a session again. Blocks for some forward passes of each
    branch. Raises `RunError`, also once `is_stopped`, `StoreError`, `ModelError`.
    """
    chosen = session_ids or _thin([*list_sessions(store)])
    audit = _open_audit(weights, is_stopped)
    branches = [
        branch if again is None or session_id not in again else replace(branch, again=again[session_id][number])
        for session_id in chosen
        for number, branch in enumerate(read_branches(store, session_id, template))
    ]
    said_at = -_SILENCE_S
    # In the order of their weights, which are then loaded once.
    for number, branch in enumerate(sorted(branches, key=lambda branch: branch.passed_versions), start=1):
        if time.monotonic() - said_at >= _SILENCE_S:
            said_at = time.monotonic()
            say(f"comparing branch {number} of {len(branches)}")
        audit.add(branch)
    return audit.report()


def _open_audit(weights: Mapping[int, Path], is_stopped: Callable[[], bool], most: int | None = None) -> "Audit":
    if not weights:
        raise RunError("expected weights to compare with, found none: name them with --weights VERSION=FOLDER")
    try:
        from harness.training.audit.audit import Audit
        from harness.training.audit.reference import Reference
    except ModuleNotFoundError as error:
        raise RunError(f"{error}: an audit needs `pip install 'session-harness[learner]'`") from None
    return Audit(Reference(weights, is_stopped), most)


def _thin(session_ids: Sequence[str]) -> Sequence[str]:
    return session_ids[:: -(-len(session_ids) // _MOST_SESSIONS) or 1]


def read_branches(store: Path, session_id: str, template: ChatTokenizer | None) -> "list[AuditedBranch]":
    """Read the branches of a session. Raises `StoreError`, `UnknownWeightVersion`."""
    from harness.training.audit.branches import AuditedBranch

    session = read_record(store, session_id).session
    if session.records_rows:
        session.put_rows(read_rows(store, session_id))
    return [*AuditedBranch.of_session(session, template)]


async def score_again(branch: "AuditedBranch", engine: TokenProvider) -> Logprobs:
    """Return what each worker finds for its tokens now, in one request without a cached prefix.

    NaN for tokens of other weights, and of workers that are gone. Raises `EngineError`.
    """
    again = np.full(branch.logprobs.size, np.nan, np.float32)
    places, workers = branch.recorded.positions, engine.workers.providers
    for name in np.unique(branch.workers):
        worker = engine if len(workers) == 1 else workers.get(str(name))
        if worker is not None:
            own = branch.workers == name
            scores = await worker.score(branch.recorded.ids[: places[own].max() + 1], start=1)
            own &= branch.versions == version_of(scores)
            again[own] = scores.logprobs[places[own] - 1]
    return again


@dataclass(slots=True)
class RunAudit:
    """Audit of a share of a run's rollouts, one at a time, while others run."""

    directory: RunDirectory
    shares: Mapping[str, float]
    """Share of the rollouts, by scenario."""
    say: Callable[[str], None]
    is_stopped: Callable[[], bool]
    tasks: asyncio.TaskGroup
    json: Json | None = None
    """Report of the rollouts so far, each against the weights that were the newest when it ended."""
    _scoring: set[asyncio.Task["list[AuditedBranch]"]] = field(default_factory=set)
    _comparing: set[asyncio.Task[None]] = field(default_factory=set)
    _one_at_a_time: asyncio.Lock = field(default_factory=asyncio.Lock)  # two would share the processor
    _again: dict[str, list[Logprobs]] = field(default_factory=dict)
    _audit: "Audit | None" = None
    _said: set[str] = field(default_factory=set)

    def add(self, scenario: str, seed: int, session_id: str | None, engine: TokenProvider) -> None:
        """Audit an ended rollout that `engine` sampled, if it is one of the share of its scenario."""
        if session_id is not None and self._is_chosen(scenario, seed):
            scored = self.tasks.create_task(self._score(session_id, engine))
            compared = self.tasks.create_task(self._audit_one(session_id, scored))
            self._scoring.add(scored)
            self._comparing.add(compared)
            scored.add_done_callback(self._scoring.discard)
            compared.add_done_callback(self._comparing.discard)

    async def await_scores(self) -> None:
        """Wait until no rollout needs its engine any more."""
        await asyncio.gather(*self._scoring)

    async def finish(self) -> None:
        """Audit the chosen rollouts together, earlier starts' too, against the newest weights."""
        for task in [*self._scoring, *self._comparing]:
            task.cancel()
        await asyncio.gather(*self._scoring, *self._comparing, return_exceptions=True)
        rollouts = read_rollouts(self.directory.database).values()
        chosen = [
            each.session_id
            for each in rollouts
            if each.session_id is not None and self._is_chosen(each.scenario, each.seed)
        ]

        def work() -> None:
            weights = find_weights(self.directory)
            template = find_template(self.directory, weights)
            store, again = self.directory.database, self._again
            self._keep(audit_sessions(store, _thin(chosen), weights, template, is_stopped=self.is_stopped, again=again))

        if chosen and not self.is_stopped():
            with self._going_on():
                await to_the_end(asyncio.to_thread(work))

    def _is_chosen(self, scenario: str, seed: int) -> bool:
        # Multiplying by an odd number spreads neighboring seeds.
        return (seed * 40503) % _SEEDS < self.shares.get(scenario, 0.0) * _SEEDS

    async def _score(self, session_id: str, engine: TokenProvider) -> "list[AuditedBranch]":
        branches: list[AuditedBranch] = []

        def read() -> None:
            template = find_template(self.directory, find_weights(self.directory))
            branches.extend(read_branches(self.directory.database, session_id, template))

        with self._going_on():
            await to_the_end(asyncio.to_thread(read))
        with self._going_on():
            async with asyncio.timeout(_SCORE_S):  # at once, before the weights change
                branches = [replace(branch, again=await score_again(branch, engine)) for branch in branches]
        self._again[session_id] = [branch.again for branch in branches]
        return branches

    async def _audit_one(self, session_id: str, scored: "asyncio.Task[list[AuditedBranch]]") -> None:
        if branches := await scored:
            async with self._one_at_a_time:
                with self._going_on():
                    found = await to_the_end(asyncio.to_thread(self._compare, branches))
                    if found.attribution.gap > _ALARM:
                        self.say(f"audit of session {session_id[:8]}: {found.verdicts[0]}")

    def _compare(self, branches: "Sequence[AuditedBranch]") -> "AuditReport":
        """Compare branches of a session with the weights of now, and report all so far."""
        weights = find_weights(self.directory)
        self._audit = self._audit or _open_audit(weights, self.is_stopped, _MOST_SESSIONS)
        self._audit.reference.weights = weights
        own = self._audit.apart()
        try:
            for branch in branches:
                own.add(branch)
            return own.report()
        finally:
            self._audit.join(own)
            with suppress(RunError):  # nothing could be read so far
                self._keep(self._audit.report())

    def _keep(self, report: "AuditReport") -> None:
        self.json = report.to_json()
        self.directory.write_json(self.directory.audit, self.json)

    @contextmanager
    def _going_on(self) -> Iterator[None]:
        """Log an error of the block, once: the run continues after any error of a model's code."""
        try:
            yield
        except Exception as error:  # noqa: BLE001
            is_late = isinstance(error, TimeoutError)
            why = "the engine took too long to score" if is_late else str(error) or type(error).__name__
            if (text := f"audit: {why}") not in self._said:
                self._said.add(text)
                self.say(text)


@asynccontextmanager
async def auditing(
    folders: Sequence[ScenarioFolder],
    directory: RunDirectory,
    say: Callable[[str], None],
    is_stopped: Callable[[], bool],
) -> AsyncIterator[RunAudit | None]:
    """Audit during the block what the scenarios ask for, to its end; None if they ask for nothing."""
    shares = {folder.name: folder.scenario.audit.share for folder in folders if folder.scenario.audit is not None}
    if not shares:
        yield None
        return
    async with asyncio.TaskGroup() as tasks:
        yield RunAudit(directory, shares, say, is_stopped, tasks)


def keep_audit(directory: RunDirectory, report: "AuditReport") -> bool:
    """Write the report of an ended run, unless it has one with probes that this one lacks; return False then."""
    with suppress(HarnessError):  # of a damaged report
        earlier = read_audit(directory)
        if earlier is not None and report.not_probed.keys() - earlier.get("not_probed", report.not_probed):
            return False
    directory.write_json(directory.audit, report.to_json())
    return True


class _Written(msgspec.Struct):
    gap: float
    shares: list[dict[str, float | str]]
    verdicts: list[str]
    groups: dict[str, list[Json]]
    sessions: dict[str, float] = {}


def read_audit(directory: RunDirectory) -> Json | None:
    """Return the report of a run's audit, if it has one. Raises `RunError` if it is damaged."""
    if not directory.audit.is_file():
        return None
    try:
        content = directory.audit.read_bytes()
        read_json(content, _Written)
        report: Json = msgspec.json.decode(content)
    except (OSError, msgspec.MsgspecError) as error:
        raise RunError(f"{directory.audit}: {error}; recreate it with `harness audit`") from error
    return report
