"""Scenarios as folders. Loading checks all files, before any session needs them."""

import os
import re
import shutil
import tomllib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from harness.engines.scripted import Script
from harness.errors import ScenarioError, TokenizerError
from harness.lab.models.tokenizer_files import SMALL_TOKENIZER, find_template
from harness.machine.cache import sha256_of
from harness.rollouts.agents.function import FunctionFile
from harness.rollouts.agents.profile import files_beside, load_profile
from harness.rollouts.agents.programs import (
    bundled_agent,
    bundled_agents,
    bundled_directory,
    find_command,
    split_command,
)
from harness.rollouts.sandboxes.sandbox import BWRAP, CONTAINERS
from harness.suite.exits import NothingSelected
from harness.suite.scenarios.prompts import ScenarioPrompts
from harness.suite.scenarios.scenario import SCHEMA_VERSION, Prompt, Scenario
from harness.suite.scenarios.validation import suggestion, validate
from harness.suite.tasks.harbor_task import PLAYED, TASK_FILE, find_tasks
from harness.types import Json

SCENARIO_FILE = "scenario.toml"
INSTRUCTION_FILE = "instruction.md"
CHECK_FILE = "check.py"


@dataclass(frozen=True, slots=True)
class ScenarioFolder:
    directory: Path
    scenario: Scenario
    instruction: str
    """Content of `instruction.md`, if any."""
    prompts: ScenarioPrompts = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        prompts = ScenarioPrompts(self.directory / SCENARIO_FILE, self.scenario, self.instruction)
        object.__setattr__(self, "prompts", prompts)

    @property
    def session_count(self) -> int:
        return len(self.prompts) * self.scenario.samples_per_prompt

    @property
    def name(self) -> str:
        return self.scenario.name

    @property
    def check(self) -> Path | None:
        """Path of `check.py`, if sessions are scored."""
        path = self.directory / CHECK_FILE
        return path if path.is_file() else None

    @property
    def agent_function(self) -> FunctionFile | None:
        """Function that plays the scenario; None for a program."""
        if self.scenario.agent.function is None:
            return None
        file, _, name = self.scenario.agent.function.rpartition(":")
        return FunctionFile(self.file(file), name)

    @property
    def agent_script(self) -> Path:
        """Script or profile, in the folder or bundled. Raises `ScenarioError`."""
        profile = self.scenario.agent.profile
        assert profile is not None, "a function plays the scenario"
        if profile.endswith((".py", ".toml")) or "/" in profile or self.file(profile).is_file():
            return (self.directory / profile).resolve()
        return bundled_agent(profile)

    @property
    def agent_command(self) -> tuple[str, ...]:
        """Command line with resolved paths; empty for a script, profile or bundled agent."""
        agent = self.scenario.agent
        if self.scenario.harbor is not None and agent.profile in PLAYED:
            return PLAYED[agent.profile]
        return find_command(agent.command or split_command(agent.profile or ""), self.directory, agent.files)

    @property
    def agent_files(self) -> dict[str, Path]:
        """Files and folders for each rollout's directory. Raises `ScenarioError`."""
        return files_beside(self.directory, self.scenario.agent.files, f"{self.directory / SCENARIO_FILE}: agent.files")

    def file(self, name: str) -> Path:
        return (self.directory / name).resolve()

    def find_template(self) -> Path | None:
        """Return the template that replaces the model's. Raises `ScenarioError`."""
        name = self.scenario.engine.template
        try:
            return None if name is None else find_template(name, self.directory)
        except TokenizerError as error:
            raise ScenarioError(f"{self.directory / SCENARIO_FILE}: engine.template: {error.message}") from None

    def text_of(self, prompt: Prompt) -> str:
        return self.instruction if prompt.text is None else prompt.text

    def session_script(self) -> Json:
        """Return `engine.script` for sessions. Raises `ScenarioError` for steps that these cannot force."""
        name = self.scenario.engine.script
        assert name is not None, "nothing is forced without a script"
        steps: list[Json] = []
        for index, step in enumerate(Script.load(self.file(name)).steps):
            if step.fault is not None or step.finish not in ("stop", "length"):
                what = step.fault or step.finish
                raise ScenarioError(
                    f"{self.file(name)}: steps[{index}]: expected no {str(what)!r} with engine.force_script: a real"
                    " engine fails by [[faults]]"
                )
            words = {"tokens": step.tokens} if step.tokens else {"text": step.text}
            steps.append({**words, "finish": str(step.finish)})
        return {"steps": steps}

    def digests(self) -> dict[str, str]:
        """Return the SHA-256 of files, besides `scenario.toml`, that affect sessions."""
        agent = self.scenario.agent
        engine, train = self.scenario.engine, self.scenario.train
        files = [INSTRUCTION_FILE, CHECK_FILE, agent.game, engine.script, engine.template]
        files += [] if train is None else [train.model_program, (train.encoder or "").partition(":")[0]]
        files += [str(each.file("scripted") or "") for each in self.scenario.teacher_specs]
        present = {name: self.file(name) for name in files if name and self.file(name).is_file()}
        present |= {os.path.relpath(path, self.directory): path for path in self.prompts.files}
        if self.agent_function is None:
            command = self.agent_command
            script = self.directory / command[0] if command else self.agent_script
            present |= {f"agent/{number}": Path(word) for number, word in enumerate(command) if Path(word).is_file()}
            present |= {f"files/{name}": path for name, path in _files_below(self.agent_files).items()}
            present["agent"] = script
            if script.suffix == ".toml":  # the files that a profile installs and starts are next to it
                present |= {f"agent/{path.name}": path for path in script.parent.iterdir() if path.is_file()}
        else:
            # It may import its neighbors.
            function = self.agent_function.path
            present |= {path.name: path for path in [function, *function.parent.glob("*.py")]}
        return {name: sha256_of(path) for name, path in sorted(present.items())}


def load_scenario(directory: Path) -> ScenarioFolder:
    """Load a scenario. Raises `ScenarioError` with one line per problem."""
    path = directory / SCENARIO_FILE
    try:
        data = tomllib.loads(_read_text(path)) if path.is_file() or not find_tasks(directory) else _of_tasks(directory)
    except tomllib.TOMLDecodeError as error:
        raise ScenarioError(f"{path}: not TOML: {error}") from error
    if len(places := [key for key in ("prompts", "prompts_file", "harbor") if key in data]) > 1:
        raise ScenarioError(f"{path}: {places[1]}: expected {' or '.join(places)}, got both")
    scenario = validate(Scenario, data, source=path)
    instruction = directory / INSTRUCTION_FILE
    folder = ScenarioFolder(
        directory=directory.resolve(),
        scenario=scenario,
        instruction=_read_text(instruction) if instruction.is_file() else "",
    )
    check_files(folder, path)
    return folder


def find_scenarios(where: str) -> list[ScenarioFolder]:
    """Return the scenarios of a folder, suite or bundled name, sorted. Raises `NothingSelected`, `ScenarioError`."""
    directory = Path(where).expanduser()
    if directory.name == SCENARIO_FILE and directory.is_file():
        directory = directory.parent
    elif not directory.is_dir():  # a path wins over a bundled name only when it is there
        bundled = {folder.name: folder for folder in bundled_directory("scenarios").iterdir() if folder.is_dir()}
        if where not in bundled:
            raise ScenarioError(
                f"{where}: expected a folder or a bundled scenario, found neither{suggestion(where, [*bundled])}"
            )
        directory = bundled[where]
    if (directory / SCENARIO_FILE).is_file() or find_tasks(directory):
        return [load_scenario(directory)]
    found = sorted(path.parent for path in directory.glob(f"*/{SCENARIO_FILE}"))
    if not found:
        raise NothingSelected(
            f"no scenario in {directory}: expected {SCENARIO_FILE} or {TASK_FILE}, or folders that hold one"
        )
    folders = [load_scenario(path) for path in found]
    name, count = Counter(folder.name for folder in folders).most_common(1)[0]
    if count > 1:  # names identify the sessions of a suite
        places = ", ".join(str(folder.directory) for folder in folders if folder.name == name)
        raise ScenarioError(f"name: expected different names in one suite, got {name!r} in {places}")
    return folders


def _of_tasks(directory: Path) -> Json:
    """Return the scenario of a folder of Harbor tasks, which their solutions play unless `--agent` names another."""
    name = re.sub(r"[^a-z0-9_-]+", "-", directory.resolve().name.lower()).strip("-_") or "harbor"
    kind = next((each for each in CONTAINERS if shutil.which(each)), BWRAP)
    return {
        "schema_version": SCHEMA_VERSION,
        "name": name,
        "description": "Harbor tasks.",
        "harbor": ".",
        "agent": {"profile": "oracle", "sandbox": {"kind": kind}},
        "engine": {"name": "scripted", "model": SMALL_TOKENIZER},
    }


def bundled_scenarios() -> list[ScenarioFolder]:
    return find_scenarios(str(bundled_directory("scenarios")))


def check_files(folder: ScenarioFolder, source: Path) -> None:
    """Raise `ScenarioError` for the first missing or unusable file."""
    scenario = folder.scenario
    named = [("agent.game", scenario.agent.game), ("engine.script", scenario.engine.script)]
    scripts = {each.name: each.file("scripted") for each in scenario.teacher_specs}
    named += [(f"teachers.{name}.engine", str(script)) for name, script in scripts.items() if script]
    if scenario.train is not None:
        encoder = scenario.train.encoder and scenario.train.encoder.partition(":")[0]
        named += [("train.model_program", scenario.train.model_program), ("train.encoder", encoder)]
        # Training needs the rewards of the check.
        named += [("train", CHECK_FILE)]
    for key, name in named:
        if name is not None and not folder.file(name).is_file():
            raise ScenarioError(f"{source}: {key}: expected a file of the scenario, got {name!r}, which does not exist")
    folder.find_template()
    if scenario.engine.force_script:
        folder.session_script()
    if folder.agent_function is not None:
        try:
            folder.agent_function.check()
        except ScenarioError as error:
            raise ScenarioError(f"{source}: agent.function: {error.message}") from None
    else:
        _check_agent(folder, source)
    if scenario.prompts_file is None:
        folder.prompts.check()
    beyond = sorted(
        {each for fault in scenario.faults for each in fault.sessions or () if each >= folder.session_count}
    )
    if beyond:
        last = folder.session_count - 1
        raise ScenarioError(
            f"{source}: faults: expected sessions from 0 to {last} and not {', '.join(map(str, beyond))}"
        )


def _files_below(places: Mapping[str, Path]) -> dict[str, Path]:
    found = [
        (name, file)
        for name, path in places.items()
        for file in (path.rglob("*") if path.is_dir() else [path])
        if file.is_file()
    ]
    return {f"{name}/{file.relative_to(places[name])}".removesuffix("/."): file for name, file in found}


def _check_agent(folder: ScenarioFolder, source: Path) -> None:
    profile, command = folder.scenario.agent.name, folder.agent_command
    key = "command" if folder.scenario.agent.command else "profile"
    _ = folder.agent_files  # raises for a missing file
    if command:
        if not os.access(folder.directory / command[0], os.X_OK):
            raise ScenarioError(
                f"{source}: agent.{key}: expected a program that can be executed, got {profile!r}; chmod +x it, or"
                f' write what runs it, as in "sh {profile}"'
            )
        return
    if folder.scenario.agent.command:
        program = folder.scenario.agent.command[0]
        raise ScenarioError(f"{source}: agent.command: expected a program of its folder or of PATH, got {program!r}")
    try:
        script = folder.agent_script
    except ScenarioError:
        script = None
    if script is None or not script.is_file():
        hint = suggestion(profile, bundled_agents())
        expected = "expected a bundled agent, a script, a profile or a command"
        raise ScenarioError(f"{source}: agent.profile: {expected}, got {profile!r}{hint}")
    if script.suffix == ".toml":
        loaded = load_profile(script)
        program, places = loaded.spec.command[0], os.pathsep.join([str(script.parent), os.environ.get("PATH", "")])
        if loaded.spec.install is None and "$" not in program and shutil.which(program, path=places) is None:
            raise ScenarioError(f"{script}: command: expected a program of its folder or of PATH, got {program!r}")


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ScenarioError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ScenarioError(f"{path}: expected UTF-8, {error.reason} at byte {error.start}") from error
