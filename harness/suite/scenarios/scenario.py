"""Content of `scenario.toml` as strict models. Each prompt is a group of `samples_per_prompt` sessions."""

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, JsonValue, field_validator, model_validator
from pydantic_core import PydanticCustomError

from harness.engines.connect import EngineName
from harness.engines.teachers import TEACHER_NAME, TeachAfter, TeacherSpec, check_teachers
from harness.errors import ScenarioError
from harness.rollouts.agents.profile import is_inside
from harness.rollouts.sandboxes.sandbox import CONTAINERS, NONE
from harness.rollouts.sandboxes.spec import SandboxSpec
from harness.suite.data.rows import Filter
from harness.suite.scenarios.fault import SIGNALS, Fault
from harness.suite.scenarios.train_spec import TrainSpec
from harness.suite.scenarios.validation import WHOLE_SENTENCE, Strict
from harness.types import Json
from server_patch.repeat_terminate import RepeatTerminateConfig

SCHEMA_VERSION = 1


def require_running_servers(name: str) -> EngineName:
    """Parse `name`. Raises `ScenarioError` unless servers run."""
    engine = EngineName.parse(name)
    if not engine.urls:
        raise ScenarioError(f"expected a server that runs, such as sglang=http://127.0.0.1:30000, got {name!r}")
    return engine


def _checked_by(parse: Callable[[str], object]) -> AfterValidator:
    def check(name: str) -> str:
        try:
            parse(name)
        except ScenarioError as error:
            # The parser's message is complete, so `validation.py` must not add "expected ..., got ...".
            raise PydanticCustomError(WHOLE_SENTENCE, "{sentence}", {"sentence": error.message}) from None
        return name

    return AfterValidator(check)


KnownEngine = Annotated[str, _checked_by(EngineName.parse)]
"""`local`, `scripted`; `sglang`, `vllm` (started by the run); `sglang=URL[,URL]`, `vllm=URL[,URL]` (running)."""

TeacherEngine = Annotated[str, _checked_by(lambda engine: TeacherSpec.parse(f"teacher={engine}"))]
"""`scripted`, `local=FOLDER`, or running servers, such as `sglang=URL`."""

RunningServers = Annotated[str, _checked_by(require_running_servers)]
"""`sglang=URL[,URL]` or `vllm=URL[,URL]`."""

KnownFilter = Annotated[str, _checked_by(Filter.parse)]


class AgentSpec(Strict):
    """Program or function that plays the scenario."""

    profile: str | None = None
    """Bundled agent, script with a PEP 723 header, profile (`*.toml`), or command line."""
    command: list[str] = Field(default_factory=list)
    """Program and arguments, instead of a profile."""
    function: str | None = None
    """`FILE.py:NAME` instead of a program: a trusted async function."""
    game: str | None = None
    """Python file with a `Game`, passed as `HARNESS_GAME`."""
    env: dict[str, str] = Field(default_factory=dict)
    """Additional variables."""
    cwd: str = ""
    """The program's directory, relative to the rollout's."""
    setup: list[str] = Field(default_factory=list)
    """Command that runs before the program."""
    files: list[str] = Field(default_factory=list)
    """Files and folders to copy into each rollout's directory."""
    request_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of model calls, such as `tools`; in `HARNESS_REQUEST_KWARGS_FILE`."""
    deadline_s: float = Field(default=600.0, gt=0)
    sandbox: SandboxSpec = SandboxSpec()
    """Sandbox of a program."""

    @field_validator("function")
    @classmethod
    def _names_a_function(cls, function: str | None) -> str | None:
        file, _, name = (function or "f.py:run").rpartition(":")
        if not (file.endswith(".py") and name.isidentifier()):
            raise ValueError("FILE.py:NAME")
        return function

    @model_validator(mode="after")
    def _is_program_or_function(self) -> Self:
        if sum(map(bool, (self.profile, self.command, self.function))) != 1:
            raise ValueError("one of profile, command and function")
        if not is_inside(self.cwd):
            raise ValueError("cwd inside the rollout's directory")
        beside = [key for key in ("game", "env", "cwd", "setup", "files") if getattr(self, key)]
        if self.function is not None and self.sandbox.kind != NONE:
            raise ValueError("no sandbox with function, which runs in the harness's process")
        if self.function is not None and beside:
            raise ValueError(f"no {' and no '.join(beside)} with function, which has no environment of its own")
        return self

    @property
    def name(self) -> str:
        return self.profile or self.function or shlex.join(self.command)


class RepeatGuardSpec(Strict):
    """Repeat guard of the engine: as `RepeatTerminateConfig`, but enabled."""

    enabled: bool = True
    """False overrides the environment."""
    min_new_tokens: int = RepeatTerminateConfig.min_new_tokens
    """Tokens before it can trigger."""
    max_consecutive_token_repeats: int = RepeatTerminateConfig.max_consecutive_token_repeats
    """Identical tokens in a row; 0 is off."""
    ngram_size: int = RepeatTerminateConfig.ngram_size
    """Length of the final n-gram; 0 is off."""
    ngram_repeats: int = RepeatTerminateConfig.ngram_repeats
    """Adjacent repeats of the n-gram; 0 and 1 are off."""
    max_object_keys: int | None = RepeatTerminateConfig.max_object_keys
    """Occurrences of the tokens of `"object_`."""

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        _ = self.config  # raises for values that do not fit together
        return self

    @property
    def config(self) -> RepeatTerminateConfig:
        return RepeatTerminateConfig(**self.model_dump())


class EngineSpec(Strict):
    """Engine of the model calls."""

    name: KnownEngine = "local"
    model: str = "smollm2-135m-instruct"
    """Catalogue name, HuggingFace folder or hub id."""
    template: str | None = None
    """Chat template instead of the model's: bundled name or file."""
    script: str | None = None
    """Script of the scripted engine."""
    force_script: bool = False
    """Force other engines to say the script."""
    repeat_guard: RepeatGuardSpec | None = None
    """Required repeat guard. Default: the environment's."""


class LaneGroup(Strict):
    engine: Literal["sglang", "vllm", "local"]
    """`local` is the harness's engine as a server."""
    count: int = Field(default=1, ge=1, le=16)


class ServicesSpec(Strict):
    """Servers to start, and running engines."""

    lanes: list[LaneGroup] = Field(default_factory=list)
    """Engine servers on this machine's CPU."""
    workers: list[RunningServers] = Field(default_factory=list)
    """Running engine servers; `--worker` replaces the servers of its kind."""
    router: bool = False
    """Put a router, with its own gateway, in front."""

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        kinds = sorted({lane.engine for lane in self.lanes})
        if not kinds and not self.workers:
            raise ValueError("lanes or workers")
        if len(kinds) > 1 and not self.router:
            raise ValueError(f"router = true with lanes of several engines ({', '.join(kinds)})")
        if self.workers and not self.router:
            raise ValueError("router = true with workers; without a router they are engine.name")
        return self

    def with_workers(self, workers: Sequence[str]) -> "ServicesSpec":
        """Return a copy with `workers` behind a router, replacing others of their kinds."""
        kinds = {EngineName.parse(worker).kind for worker in workers}
        lanes = [lane for lane in self.lanes if lane.engine not in kinds]
        others = [worker for worker in self.workers if EngineName.parse(worker).kind not in kinds]
        return ServicesSpec(lanes=lanes, workers=[*others, *workers], router=True)


class TeacherTable(Strict):
    """Engine that scores sampled tokens."""

    engine: TeacherEngine
    when: Literal["turn", "end", "off"] = "turn"
    """After each turn, when samples are collected, or not at all."""
    top_k: int = Field(default=0, ge=0, le=20)
    """Most likely tokens that it returns per sampled token; with some, training uses them."""


class AuditSpec(Strict):
    """Comparison of sampled tokens with the trainer's weights, while the run continues."""

    share: float = Field(gt=0, le=1)
    """Share of the rollouts."""


class Prompt(Strict):
    """A group of sessions."""

    text: str | None = None
    """Instruction; default: `instruction.md`."""
    metadata: dict[str, Any] = Field(default_factory=dict)
    """Data for agent, game and check."""
    check_metadata: dict[str, Any] = Field(default_factory=dict)
    """Metadata for the check alone."""

    @model_validator(mode="after")
    def _says_everything_once(self) -> Self:
        twice = sorted(self.metadata.keys() & self.check_metadata.keys())
        if twice:
            raise ValueError(f"metadata or check_metadata to have {', '.join(twice)}, and not both")
        return self


class DataSpec(Strict):
    """Rows of `prompts` or `prompts_file` that run, and what their columns are."""

    split: str | None = None
    """Part of a folder, such as `train`."""
    prompt: str | None = None
    """Column of texts or messages; default: `prompt`, `messages` or `question`."""
    metadata: list[str] = Field(default_factory=list)
    """Columns for agent, game and check."""
    check_metadata: list[str] = Field(default_factory=list)
    """Columns for the check alone."""
    filter: list[KnownFilter] = Field(default_factory=list)
    """Conditions such as `level<3`, all of which must hold."""
    shuffle: int | None = Field(default=None, ge=0)
    """Seed of a random order, another one in each epoch."""
    limit: int | None = Field(default=None, ge=1)
    """Rows to keep, after filter and shuffle."""
    epochs: int = Field(default=1, ge=1)
    """Passes over the rows that are kept."""

    @model_validator(mode="after")
    def _says_everything_once(self) -> Self:
        twice = sorted({*self.metadata} & {*self.check_metadata})
        if twice:
            raise ValueError(f"metadata or check_metadata to have {', '.join(twice)}, and not both")
        return self

    @property
    def columns(self) -> list[str]:
        """Columns that are mapped to prompts; without any, rows are prompts themselves."""
        return [*([] if self.prompt is None else [self.prompt]), *self.metadata, *self.check_metadata]


class LimitsSpec(Strict):
    turns: int | None = Field(default=None, ge=1)
    tokens_per_turn: int | None = Field(default=None, ge=1)
    tokens_per_session: int | None = Field(default=None, ge=1)
    staleness: int | None = Field(default=None, ge=0)
    """Weight updates that a branch may span."""


class Sampling(Strict):
    """Sampling parameters that override the agent's."""

    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=0)
    min_p: float | None = Field(default=None, ge=0, le=1)


class PlannedUpdate(Strict):
    """One change of the weights."""

    when: Literal["in_turn", "in_tool_call", "session_ended"]
    """A turn is sampled, a session is between turns, or one has just ended."""
    after_turns: int = Field(default=1, ge=0)
    """Turns of all sessions since the previous update."""


class Weights(Strict):
    """Weight updates, with generated checkpoints."""

    updates: list[PlannedUpdate] = Field(min_length=1)
    """The first brings version 1."""
    noise: float = Field(default=0.02, gt=0)
    """Noise in standard deviations of each tensor."""
    mode: Literal["abort", "keep"] = "abort"
    """Turns in flight: `abort` continues them with new requests, `keep` freezes them."""
    sweep_s: float = Field(default=60.0, gt=0)
    """Seconds to score what waits for the outgoing version."""


class Checks(Strict):
    """Conditions on a finished run, besides its ledger."""

    min_finished: int | None = Field(default=None, ge=0)
    """Sessions whose agent ended by itself or at a limit."""
    min_reward_mean: float | None = None
    """Mean over the sessions with a reward."""
    min_turns: int | None = Field(default=None, ge=1)
    """Model calls per session."""
    min_tool_calls: int | None = Field(default=None, ge=0)
    """Tool calls, over all sessions."""
    min_truncated_turns: int | None = Field(default=None, ge=0)
    """Turns cut by a length limit or the repeat guard."""
    expect_dropped_trailing_turns: bool | None = None
    """True: samples lost turns after an incomplete one; false: none did."""
    min_policy_versions: int | None = Field(default=None, ge=1)
    """Weight versions that sampled tokens."""
    min_proximal_tokens: int | None = Field(default=None, ge=1)
    """Tokens scored under their next version."""
    min_proximal_share: float | None = Field(default=None, gt=0, le=1)
    """Share of them among tokens whose next version was live."""
    expect_faults_fired: bool = True
    """Every fault fired at least once."""
    expect_witness_agrees: bool = True
    """Engines' token counters confirm the ledger."""
    check_deadline_s: float = Field(default=10.0, gt=0)
    """Seconds for `check.py` per session."""


class Scenario(Strict):
    schema_version: Literal[1]
    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]*$")]
    description: str
    """One sentence for `harness scenario list`."""
    agent: AgentSpec
    engine: EngineSpec = Field(default_factory=EngineSpec)
    services: ServicesSpec | None = None
    """Engine servers, instead of `engine.name`."""
    prompts: list[Prompt] = Field(default_factory=lambda: [Prompt()], min_length=1)
    prompts_file: str | None = None
    """Data set, instead of `prompts`: JSON lines, CSV, Parquet, Arrow, or a folder of them."""
    harbor: str | None = None
    """Harbor task or folder of tasks, instead of `prompts`; `agent.sandbox` runs them."""
    data: DataSpec = Field(default_factory=DataSpec)
    samples_per_prompt: int = Field(default=1, ge=1)
    limits: LimitsSpec = Field(default_factory=LimitsSpec)
    sampling: Sampling = Field(default_factory=Sampling)
    record: list[Literal["routed_experts", "sampling_mask"]] = Field(default_factory=list)
    """Rows to record with tokens."""
    after_incomplete: Literal["refuse", "serve"] = "refuse"
    """After an incomplete turn, refuse or (for evaluation) serve calls."""
    template_variables: dict[str, JsonValue] = Field(default_factory=dict)
    """For the chat template, such as `enable_thinking`."""
    seed: int = Field(default=0, ge=0)
    """Base of the session seeds."""
    concurrency: int = Field(default=4, ge=1)
    """Sessions at a time; `-n` overrides it."""
    teachers: dict[Annotated[str, Field(pattern=TEACHER_NAME)], TeacherTable] = Field(default_factory=dict)
    """Engines that score sampled tokens, by name."""
    audit: AuditSpec | None = None
    weights: Weights | None = None
    faults: list[Fault] = Field(default_factory=list)
    train: TrainSpec | None = None
    checks: Checks = Field(default_factory=Checks)

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        if expected := next(self._find_missing(), None):
            raise ValueError(expected)
        return self

    def _find_missing(self) -> Iterator[str]:
        """Yield what tables that do not fit together lack or have too much."""
        # A default name counts as not given.
        if self.services is not None and self.engine.name != EngineSpec().name:
            yield "engine.name or services, and not both"
        if self.services is not None and self.engine.script is not None and not self.engine.force_script:
            yield "no engine.script with services without engine.force_script: lanes have weights"
        if self.engine.force_script and self.engine.script is None:
            yield "engine.script with engine.force_script"
        taught = () if self.train is None else self.train.teachers.keys()
        if not {name for name, table in self.teachers.items() if table.when != "off"}.issuperset(taught):
            yield "a table teachers.NAME that is not off for each name in train.teachers"
        box = self.agent.sandbox
        if self.harbor is None and box.kind in CONTAINERS and box.image is None:
            yield f"agent.sandbox.image with {box.kind}"
        if self.harbor is not None and (box.kind == NONE or self.train is not None):
            yield "agent.sandbox.kind with harbor, and no train"
        if self.train is not None:
            yield from self._find_missing_to_train(self.train)
        # Signals go to the agent's process group.
        signals = sorted({fault.action for fault in self.faults} & SIGNALS)
        if signals and self.agent.function is not None:
            yield f"no {' and no '.join(signals)} with agent.function, which has no process of its own"

    def _find_missing_to_train(self, train: TrainSpec) -> Iterator[str]:
        if train.budget % self.samples_per_prompt:
            yield (
                f"train.rollouts_per_step as a multiple of samples_per_prompt, which is {self.samples_per_prompt}, and"
                f" not {train.budget}"
            )
        if train.advantage in ("rollout", "turn", "return_to_go") and self.samples_per_prompt < 2:
            yield f"samples_per_prompt of at least 2 with train.advantage = {train.advantage!r}"
        for table in ("weights", "faults"):
            if getattr(self, table):
                yield f"no {table} with train, which changes the weights itself"

    def session(self, seed: int) -> Json:
        """Return the body of `POST /sessions`, without metadata."""
        stated = {"template_variables": self.template_variables, "record": self.record}
        return {
            "limits": self.limits.model_dump(exclude_none=True),
            "sampling": {**self.sampling.model_dump(exclude_none=True), "seed": seed},
            "after_incomplete": self.after_incomplete,
            **{name: value for name, value in stated.items() if value},  # empty keeps a profile's
        }

    @property
    def teacher_specs(self) -> tuple[TeacherSpec, ...]:
        """Teachers that are not off. Raises `ScenarioError`."""
        specs = tuple(
            replace(TeacherSpec.parse(f"{name}={table.engine}", TeachAfter(table.when)), top_k=table.top_k)
            for name, table in self.teachers.items()
            if table.when != "off"
        )
        check_teachers(specs, *([self.engine.name] if self.services is None else self.services.workers))
        return specs

    @property
    def forces_tokens(self) -> bool:
        """True if sessions bring a script because the engine has none."""
        own = self.services is None and EngineName.parse(self.engine.name).plays_script
        return self.engine.force_script and not own
