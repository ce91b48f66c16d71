"""The content of `scenario.toml`, as strict models: no unknown keys, no silent conversions.

A scenario is one situation to put a model into: an agent, prompts, limits, and the checks that decide whether a run of
it passed. Every prompt is a group of `samples_per_prompt` sessions. This module knows the words and their ranges; the
files around them are read in `folder.py`.
"""

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from harness.engines.connect import EngineName
from harness.errors import ScenarioError
from harness.suite.scenarios.fault import SIGNALS, Fault
from harness.suite.scenarios.train_spec import TrainSpec
from harness.suite.scenarios.validation import WHOLE_SENTENCE
from harness.types import Json
from server_patch.repeat_terminate import RepeatTerminateConfig

SCHEMA_VERSION = 1


def require_running_servers(name: str) -> EngineName:
    """The parts of `name`. Raises `ScenarioError` unless it names servers that run."""
    engine = EngineName.parse(name)
    if not engine.urls:
        raise ScenarioError(f"expected a server that runs, such as sglang=http://127.0.0.1:30000, got {name!r}")
    return engine


def _checked_by(parse: Callable[[str], EngineName]) -> AfterValidator:
    def check(name: str) -> str:
        try:
            parse(name)
        except ScenarioError as error:
            raise PydanticCustomError(WHOLE_SENTENCE, "{sentence}", {"sentence": error.message}) from None
        return name

    return AfterValidator(check)


KnownEngine = Annotated[str, _checked_by(EngineName.parse)]
"""`local`, `scripted`; `sglang`, `vllm`, which the run starts; or `sglang=URL[,URL]`, `vllm=URL[,URL]`, which run."""


RunningServers = Annotated[str, _checked_by(require_running_servers)]
"""`sglang=URL[,URL]` or `vllm=URL[,URL]`."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)


class AgentSpec(_Strict):
    """The program or function that plays the scenario."""

    profile: str | None = None
    """Name of a bundled agent (`harness agent list`), the path of a script with a PEP 723 header or of a profile
    (`*.toml`), or any other command line, whose files are those of the scenario."""
    function: str | None = None
    """`FILE.py:NAME`, in the place of a program: an async function in a file of the scenario, trusted code."""
    game: str | None = None
    """Python file with a `Game` that the agent talks to; handed over as `HARNESS_GAME`."""
    env: dict[str, str] = Field(default_factory=dict)
    """Added to the environment of the agent."""
    request_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of every model call, such as `tools`; handed over as `HARNESS_REQUEST_KWARGS_FILE`."""
    deadline_s: float = Field(default=600.0, gt=0)
    """The agent is stopped after this many seconds."""

    @field_validator("function")
    @classmethod
    def _names_a_function(cls, function: str | None) -> str | None:
        file, _, name = (function or "f.py:run").rpartition(":")
        if not (file.endswith(".py") and name.isidentifier()):
            raise ValueError("FILE.py:NAME")
        return function

    @model_validator(mode="after")
    def _is_program_or_function(self) -> Self:
        if (self.profile is None) == (self.function is None):
            raise ValueError("either profile or function")
        beside = [key for key in ("game", "env") if getattr(self, key)]
        if self.function is not None and beside:
            raise ValueError(f"no {' and no '.join(beside)} beside function, which has no environment of its own")
        return self

    @property
    def name(self) -> str:
        """The profile or the function."""
        return self.profile or self.function or ""


class RepeatGuardSpec(_Strict):
    """The repeat guard that the engine must run: the keys and defaults of `RepeatTerminateConfig`, but enabled."""

    enabled: bool = True
    """False does without, whatever the environment says."""
    min_new_tokens: int = RepeatTerminateConfig.min_new_tokens
    """Nothing triggers while fewer tokens have been generated."""
    max_consecutive_token_repeats: int = RepeatTerminateConfig.max_consecutive_token_repeats
    """This many identical tokens in a row trigger; 0 is off."""
    ngram_size: int = RepeatTerminateConfig.ngram_size
    """Length of the n-gram at the end of the output; 0 is off."""
    ngram_repeats: int = RepeatTerminateConfig.ngram_repeats
    """This many times the n-gram back to back triggers; 0 and 1 are off."""
    max_object_keys: int | None = RepeatTerminateConfig.max_object_keys
    """This many occurrences of the tokens of `"object_` trigger."""

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        _ = self.config  # which raises
        return self

    @property
    def config(self) -> RepeatTerminateConfig:
        """The configuration of engines."""
        return RepeatTerminateConfig(**self.model_dump())


class EngineSpec(_Strict):
    """The engine that answers the agent's model calls."""

    name: KnownEngine = "local"
    model: str = "smollm2-135m-instruct"
    """Catalogue name, HuggingFace folder or hub id; the scripted engine takes its tokenizer."""
    template: str | None = None
    """Chat template in the place of the model's: the name of one of ours, or a file of the scenario."""
    script: str | None = None
    """Script of the scripted engine, a file of the scenario."""
    force_script: bool = False
    """Any other engine says the script, too: as that of each session, its delays left out."""
    repeat_guard: RepeatGuardSpec | None = None
    """The engine runs this repeat guard or does not start; without it, the environment's, if there is one."""


class LaneGroup(_Strict):
    """Engine servers of one kind."""

    engine: Literal["sglang", "vllm", "local"]
    """The program; `local` is the harness's own engine as a server."""
    count: int = Field(default=1, ge=1, le=16)
    """How many of them."""


class ServicesSpec(_Strict):
    """The servers of a scenario: those that a run starts for it and ends with it, and engines that run already."""

    lanes: list[LaneGroup] = Field(default_factory=list)
    """Engine servers on this machine's CPU; all serve `engine.model`."""
    workers: list[RunningServers] = Field(default_factory=list)
    """Engine servers that run already, for the router; `--worker` puts others in the place of those of its kind."""
    router: bool = False
    """Sessions come through a router, with a gateway of its own, in front of lanes and workers."""

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        kinds = sorted({lane.engine for lane in self.lanes})
        if not kinds and not self.workers:
            raise ValueError("lanes or workers")
        if len(kinds) > 1 and not self.router:
            raise ValueError(f"router = true beside lanes of several engines ({', '.join(kinds)})")
        if self.workers and not self.router:
            raise ValueError("router = true beside workers; without a router they are engine.name")
        return self

    def with_workers(self, workers: Sequence[str]) -> "ServicesSpec":
        """`workers` in the place of the lanes and the workers of their kinds, behind a router."""
        kinds = {EngineName.parse(worker).kind for worker in workers}
        lanes = [lane for lane in self.lanes if lane.engine not in kinds]
        others = [worker for worker in self.workers if EngineName.parse(worker).kind not in kinds]
        return ServicesSpec(lanes=lanes, workers=[*others, *workers], router=True)


class Prompt(_Strict):
    """One group of sessions."""

    text: str | None = None
    """The instruction; without it the agent gets `instruction.md`."""
    metadata: dict[str, Any] = Field(default_factory=dict)
    """Handed to the agent, to its game and to the check."""
    check_metadata: dict[str, Any] = Field(default_factory=dict)
    """For the check alone, which finds it among the metadata: the answer that the agent is to find."""

    @model_validator(mode="after")
    def _says_everything_once(self) -> Self:
        twice = sorted(self.metadata.keys() & self.check_metadata.keys())
        if twice:
            raise ValueError(f"metadata or check_metadata to have {', '.join(twice)}, and not both")
        return self


class LimitsSpec(_Strict):
    """The most that a session may use up."""

    turns: int | None = Field(default=None, ge=1)
    tokens_per_turn: int | None = Field(default=None, ge=1)
    tokens_per_session: int | None = Field(default=None, ge=1)
    staleness: int | None = Field(default=None, ge=0)
    """Weight updates that a branch may have met and still go on."""


class Sampling(_Strict):
    """Sampling parameters that override what the agent asks for."""

    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=0)
    min_p: float | None = Field(default=None, ge=0, le=1)


class PlannedUpdate(_Strict):
    """One change of the weights under the running sessions."""

    when: Literal["in_turn", "in_tool_call", "session_ended"]
    """The moment: a turn is being sampled, a session sits between two turns, or a session has just ended."""
    after_turns: int = Field(default=1, ge=0)
    """Not before the sessions have made so many more turns together."""


class Weights(_Strict):
    """Weights that change while the scenario runs: version n is a checkpoint made on the spot."""

    updates: list[PlannedUpdate] = Field(min_length=1)
    """In their order; the first one brings version 1."""
    noise: float = Field(default=0.02, gt=0)
    """How far each checkpoint is from the model, in standard deviations of its tensors."""
    mode: Literal["abort", "keep"] = "abort"
    """The fate of turns in flight: they end and go on with a new request, or they freeze."""
    sweep_s: float = Field(default=60.0, gt=0)
    """Time for scoring what waits for the version that is about to go, before each update."""


class Checks(_Strict):
    """The conditions that a finished run must meet; the ledger is checked in every run, asked or not."""

    min_finished: int | None = Field(default=None, ge=0)
    """Sessions whose agent ended by itself, or at a limit of the session."""
    min_reward_mean: float | None = None
    """Mean reward over the sessions that have one."""
    min_turns: int | None = Field(default=None, ge=1)
    """Model calls in every session."""
    min_tool_calls: int | None = Field(default=None, ge=0)
    """Tool calls that the model made, over all sessions."""
    min_truncated_turns: int | None = Field(default=None, ge=0)
    """Turns that ended at a length limit or by the repeat guard, over all sessions."""
    expect_dropped_trailing_turns: bool | None = None
    """Whether samples lost the turns after an incomplete one (true), or none did (false)."""
    min_policy_versions: int | None = Field(default=None, ge=1)
    """Different weights that sampled tokens, over all samples."""
    min_proximal_tokens: int | None = Field(default=None, ge=1)
    """Tokens whose proximal logprob is that of their next version, over all samples."""
    min_proximal_share: float | None = Field(default=None, gt=0, le=1)
    """The same as a share of the tokens whose next version has been live."""
    expect_faults_fired: bool = True
    """Every fault of the scenario came at least once."""
    expect_witness_agrees: bool = True
    """The engines' own counters say no token more or less than the ledger has or calls unknown, where they can tell."""
    check_deadline_s: float = Field(default=10.0, gt=0)
    """Time for `check.py` to score one session."""


class Scenario(_Strict):
    """A `scenario.toml`."""

    schema_version: Literal[1]
    """Version of this format."""
    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]*$")]
    description: str
    """One sentence for the reader of `harness scenario list`."""
    agent: AgentSpec
    engine: EngineSpec = Field(default_factory=EngineSpec)
    services: ServicesSpec | None = None
    """Engine servers and a router, in the place of `engine.name`; without it the engine is that."""
    prompts: list[Prompt] = Field(default_factory=lambda: [Prompt()], min_length=1)
    prompts_file: str | None = None
    """A file of the scenario, in the place of `prompts`: one prompt per line, as JSON."""
    samples_per_prompt: int = Field(default=1, ge=1)
    limits: LimitsSpec = Field(default_factory=LimitsSpec)
    sampling: Sampling = Field(default_factory=Sampling)
    after_incomplete: Literal["refuse", "serve"] = "refuse"
    """The answer of a session after a turn that was cut: nothing more, or (for evaluation) the next turn."""
    template_variables: dict[str, JsonValue] = Field(default_factory=dict)
    """Variables of the chat template, such as `enable_thinking`, for every session."""
    seed: int = Field(default=0, ge=0)
    """Seeds of the sessions derive from it."""
    concurrency: int = Field(default=4, ge=1)
    """Sessions at a time, unless `-n` says otherwise."""
    weights: Weights | None = None
    """Weights that change under the sessions; without it they stay."""
    faults: list[Fault] = Field(default_factory=list)
    """The faults that come while the scenario runs."""
    train: TrainSpec | None = None
    """How `harness train` trains on it; without it the scenario cannot be trained on."""
    checks: Checks = Field(default_factory=Checks)

    @field_validator("faults")
    @classmethod
    def _name_sessions_that_exist(cls, faults: list[Fault], info: ValidationInfo) -> list[Fault]:
        count = len(info.data.get("prompts", ())) * info.data.get("samples_per_prompt", 0)
        beyond = sorted({each for fault in faults for each in fault.sessions or () if count and each >= count})
        if beyond:
            raise ValueError(f"sessions from 0 to {count - 1} and not {', '.join(map(str, beyond))}")
        return faults

    @model_validator(mode="after")
    def _has_one_engine(self) -> Self:
        if self.services is not None:
            if self.engine.name != EngineSpec().name:
                raise ValueError("engine.name or services, and not both")
            if self.engine.script is not None and not self.engine.force_script:
                raise ValueError("no engine.script beside services without engine.force_script: lanes have weights")
        if self.engine.force_script and self.engine.script is None:
            raise ValueError("engine.script beside engine.force_script")
        return self

    @model_validator(mode="after")
    def _can_be_trained_on(self) -> Self:
        if self.train is None:
            return self
        if self.train.budget % self.samples_per_prompt:
            raise ValueError(
                f"train.rollouts_per_step as a multiple of samples_per_prompt, which is {self.samples_per_prompt}, and"
                f" not {self.train.budget}"
            )
        if self.train.advantage in ("rollout", "turn", "return_to_go") and self.samples_per_prompt < 2:
            raise ValueError(f"samples_per_prompt of at least 2 beside train.advantage = {self.train.advantage!r}")
        for table in ("weights", "faults"):
            if getattr(self, table):
                raise ValueError(f"no {table} beside train, which changes the weights itself")
        return self

    @model_validator(mode="after")
    def _signals_processes_only(self) -> Self:
        signals = sorted({fault.action for fault in self.faults} & SIGNALS)
        if signals and self.agent.function is not None:
            raise ValueError(f"no {' and no '.join(signals)} beside agent.function, which has no process of its own")
        return self

    @property
    def variables(self) -> Json:
        """The part of the body of `POST /sessions` that sets variables; a profile's stay where it sets none."""
        return {"template_variables": self.template_variables} if self.template_variables else {}

    @property
    def forces_tokens(self) -> bool:
        """Its sessions have a script, because the engine has none of its own."""
        own = self.services is None and EngineName.parse(self.engine.name).plays_script
        return self.engine.force_script and not own

    @property
    def session_count(self) -> int:
        """Sessions of one run."""
        return len(self.prompts) * self.samples_per_prompt
