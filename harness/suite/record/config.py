"""Configuration of a run, in `config.toml`. A run resumes only with an equal one; concurrency is not in it."""

import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self

import tomli_w

from harness.engines.connect import EngineName
from harness.errors import RunError, ScenarioError
from harness.lab.models.tokenizer_files import SMALL_TOKENIZER
from harness.suite.scenarios.folder import SCENARIO_FILE, ScenarioFolder, check_files, find_scenarios, load_scenario
from harness.suite.scenarios.scenario import (
    EngineSpec,
    KnownEngine,
    KnownFilter,
    RunningServers,
    Scenario,
    ServicesSpec,
)
from harness.suite.scenarios.validation import Strict, validate
from harness.suite.tasks.harbor_task import PLAYED

_FIXED = frozenset({"name", "schema_version", "prompts_file"})
"""Keys of the scenario's identity and format."""


class Overrides(Strict):
    """Command line options that override scenarios."""

    server: str | None = None
    """Running session server or router, instead of engines."""
    engine: KnownEngine | None = None
    workers: list[RunningServers] | None = None
    """Running engine servers behind the run's router."""
    model: str | None = None
    template: str | None = None
    """Bundled name or absolute path of a chat template."""
    agent: str | None = None
    seed: int | None = None
    settings: list[str] | None = None
    """Keys of `scenario.toml` as TOML, such as `limits.turns = 3`. Other options win."""
    filter: list[KnownFilter] | None = None
    """Conditions on rows, besides the scenario's."""
    limit: int | None = None
    shuffle: int | None = None
    epochs: int | None = None

    def over(self, other: Self) -> Self:
        return other.model_copy(update=self.model_dump(exclude_none=True))

    def apply(self, scenario: Scenario) -> Scenario:
        """Override `scenario`. An engine replaces services, workers the engine. Raises `ScenarioError`."""
        if self.settings is not None:
            scenario = _set_keys(scenario, self.settings)
        if self.agent is not None:
            scenario = _play(scenario, self.agent)
        changes = _leave_out_none(name=self.engine, model=self.model, template=self.template)
        if self.model is None and _plays_script(self.engine) and not _plays_script(scenario.engine.name):
            changes["model"] = SMALL_TOKENIZER  # a script does not need a model download
        data = _leave_out_none(limit=self.limit, shuffle=self.shuffle, epochs=self.epochs)
        data |= {"filter": [*scenario.data.filter, *(self.filter or ())]}
        instead = _leave_out_none(seed=self.seed, data=scenario.data.model_copy(update=data))
        if self.model is not None and scenario.train is not None:
            # Another model replaces the one that the program would make.
            instead["train"] = scenario.train.model_copy(update={"model_program": None})
        if self.engine is not None:
            instead["services"] = None
        elif self.workers is not None:
            services = scenario.services or ServicesSpec(workers=self.workers, router=True)
            instead["services"] = services.with_workers(self.workers)
            changes["name"] = EngineSpec().name
            changes["script"] = scenario.engine.script if scenario.engine.force_script else None
        return scenario.model_copy(update={"engine": scenario.engine.model_copy(update=changes), **instead})


class ScenarioEntry(Strict):
    """A resolved scenario, with file digests."""

    directory: str
    files: dict[str, str]
    scenario: Scenario


class RunConfig(Strict):
    schema_version: Literal[1] = 1
    suite: str
    overrides: Overrides
    scenarios: list[ScenarioEntry]
    trains: bool = False

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a configuration. Raises `RunError`."""
        try:
            data = tomllib.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise RunError(f"{path.parent} is not a run directory: it has no {path.name}") from None
        except (OSError, ValueError) as error:
            raise RunError(f"{path}: {error}") from error
        return validate(cls, data, source=path)

    def to_toml(self) -> str:
        return tomli_w.dumps(self.model_dump(mode="json", exclude_none=True))

    def reload(self, overrides: Overrides) -> "SuiteSelection":
        """Reload the scenario files; `overrides` win over the recorded ones."""
        folders = [load_scenario(Path(entry.directory)) for entry in self.scenarios]
        return SuiteSelection.of(self.suite, folders, overrides.over(self.overrides), trains=self.trains)

    def check_unchanged(self, now: "RunConfig") -> None:
        """Raise `RunError` with one line per difference."""
        problem = "the configuration has changed since the run began; undo it or start a new run"
        require_equal(self.model_dump(mode="json"), now.model_dump(mode="json"), problem)


@dataclass(frozen=True, slots=True)
class SuiteSelection:
    folders: list[ScenarioFolder]
    config: RunConfig

    @classmethod
    def of(cls, suite: str, folders: Sequence[ScenarioFolder], overrides: Overrides, *, trains: bool = False) -> Self:
        """Override `folders`. Raises `ScenarioError` if a shared server, or a run that `trains`, cannot take them."""
        if overrides.server is not None:
            _require_no_engine(overrides.settings or (), folders)
        if trains and (len(folders) != 1 or folders[0].scenario.train is None):
            names = ", ".join(folder.name for folder in folders)
            raise ScenarioError(
                f"{suite}: expected one scenario that has a table [train], got {names}; add [train] to scenario.toml,"
                " or train the bundled train_tool_game"
            )
        resolved = [replace(folder, scenario=overrides.apply(folder.scenario)) for folder in folders]
        if overrides.server is not None:
            _require_shareable(resolved)
        _require_weights(resolved)
        for folder in resolved:  # settings may name other files
            check_files(folder, folder.directory / SCENARIO_FILE)
            folder.prompts.check()
            folder.prompts.require_playable()
        entries = [
            ScenarioEntry(directory=str(folder.directory), files=folder.digests(), scenario=folder.scenario)
            for folder in resolved
        ]
        return cls(resolved, RunConfig(suite=suite, overrides=overrides, scenarios=entries, trains=trains))


def select(suite: str, overrides: Overrides, *, trains: bool = False) -> SuiteSelection:
    """Find and override scenarios. Raises `ScenarioError`."""
    return SuiteSelection.of(suite, find_scenarios(suite), overrides, trains=trains)


def differences(before: Any, now: Any, key: str = "") -> Iterator[str]:
    """Yield `key: before -> now` for each leaf that differs."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for name in sorted({*before, *now}):
            yield from differences(before.get(name), now.get(name), f"{key}.{name}".lstrip("."))
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for position, (old, new) in enumerate(zip(before, now, strict=True)):
            yield from differences(old, new, f"{key}[{position}]")
    elif before != now:
        yield f"{key}: {before!r} -> {now!r}"


def require_equal(before: Any, now: Any, problem: str) -> None:
    """Raise `RunError` with `problem` and one line per difference."""
    lines = [f"  {line}" for line in differences(before, now)]
    if lines:
        raise RunError("\n".join([f"{problem}:", *lines]))


def _play(scenario: Scenario, agent: str) -> Scenario:
    data = scenario.model_dump(exclude_unset=True)
    data["agent"] |= {"profile": agent, "function": None, "command": []}
    # Tasks without a scenario have an engine without a model or a script, which their solutions do not call.
    engine = scenario.engine
    is_mute = engine.model == SMALL_TOKENIZER and engine.script is None
    if scenario.harbor is not None and agent not in PLAYED and is_mute:
        data["engine"] |= {"name": EngineSpec().name, "model": EngineSpec().model}
    return validate(Scenario, data, source=Path(f"{scenario.name} with --agent"))


def _set_keys(scenario: Scenario, settings: Iterable[str]) -> Scenario:
    data: dict[str, Any] = scenario.model_dump(exclude_unset=True)
    for text in settings:
        _merge(data, _parse_setting(text))
    return validate(Scenario, data, source=Path(f"{scenario.name} with --set"))


def _parse_setting(text: str) -> dict[str, Any]:
    try:
        wanted = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ScenarioError(
            f"--set: expected KEY=VALUE as a line of scenario.toml, got {text!r} ({error}); put text in quotes"
            " that the shell does not remove: 'engine.name=\"scripted\"'"
        ) from None
    if not wanted or _FIXED & wanted.keys():
        raise ScenarioError(f"--set: expected KEY=VALUE and no key of {', '.join(sorted(_FIXED))}, got {text!r}")
    return wanted


def _merge(table: dict[str, Any], wanted: Mapping[str, Any]) -> None:
    for key, value in wanted.items():
        if isinstance(value, dict) and isinstance(table.get(key), dict):
            _merge(table[key], value)
        else:
            table[key] = value


def _plays_script(engine: str | None) -> bool:
    return engine is not None and EngineName.parse(engine).plays_script


def _require_shareable(folders: Iterable[ScenarioFolder]) -> None:
    # Weights and faults change or break the whole server and its engines.
    problems = [
        f"{folder.name}: {key} changes or breaks the whole server and its engines, which others use too:"
        " run it without --server"
        for folder in folders
        for key in ("weights", "faults")
        if getattr(folder.scenario, key)
    ]
    problems += [
        f"{folder.name}: audit reads the run's own sessions: run it without --server, and audit that server's store"
        for folder in folders
        if folder.scenario.audit
    ]
    if problems:
        raise ScenarioError("\n".join(problems))


def _require_weights(folders: Iterable[ScenarioFolder]) -> None:
    for folder in folders:
        model = folder.scenario.engine.model
        has_none = model == SMALL_TOKENIZER or (Path(model).is_dir() and not any(Path(model).glob("*.safetensors")))
        if folder.scenario.weights is not None and has_none:
            raise ScenarioError(
                f"{folder.name}: weights.updates: expected a model with weights, got {model}; name one with --model"
            )


def _require_no_engine(settings: Iterable[str], folders: Iterable[ScenarioFolder]) -> None:
    """Raise `ScenarioError` for settings that a running server ignores."""
    wanted: dict[str, Any] = {}
    for text in settings:
        _merge(wanted, _parse_setting(text))
    engine = wanted.get("engine")
    keys = engine if isinstance(engine, dict) else {}
    asked = {"repeat_guard", "force_script"}
    if keys.get("force_script", any(folder.scenario.engine.force_script for folder in folders)):
        asked.add("script")
    ignored = [f"engine.{key}" for key in keys if key not in asked]
    if "services" in wanted:
        ignored.append("services")
    if ignored:
        raise ScenarioError(
            f"expected --server, or --set {ignored[0]}, got both: a running server has its own engine, model and"
            " services"
        )


def _leave_out_none(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
