"""The front door: the names that `import harness` offers, where they are defined, and what the import costs."""

import ast
import inspect
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

import harness

pytestmark = pytest.mark.xdist_group("torch")  # which two of the names import

PUBLIC = [
    "SessionManager",
    "AgentTask",
    "ProgramAgent",
    "FunctionAgent",
    "SandboxSpec",
    "bundled_agent",
    "prepare_agent",
    "Rollout",
    "Outcome",
    "OutcomeKind",
    "Deadlines",
    "abort_rollout",
    "AbortBudget",
    "AbortReport",
    "AgentHooks",
    "Keep",
    "paused_rollout",
    "PauseReport",
    "WeightUpdater",
    "NodeSetup",
    "NodeRollout",
    "RayRollouts",
    "UpdateBudget",
    "UpdateReport",
    "PauseMode",
    "SessionServerAddress",
    "serve",
    "RunningServer",
    "ServerSettings",
    "TeacherSpec",
    "open_store",
    "MemoryStore",
    "SQLiteStore",
    "open_engine",
    "TokenProvider",
    "SGLangTokenProvider",
    "VLLMTokenProvider",
    "HuggingFaceTokenProvider",
    "ChatTemplateTokenizer",
    "check_logprobs_close",
    "EnginePool",
    "ScriptedEngine",
    "Script",
    "ScriptStep",
    "ScriptedFault",
    "Sample",
    "SampleStatus",
    "Selection",
    "Turn",
    "TurnEnd",
    "TurnStatus",
    "SamplingParams",
    "GenerationRequest",
    "GenerationResult",
    "open_chat_tokenizer",
    "resolve_model",
    "read_samples",
    "write_samples",
    "read_run",
    "errors",
    "training",
    "HarnessError",
]
TRAINING = [
    "Segment",
    "TooLong",
    "fit_segment",
    "LostTokens",
    "SegmentEncoder",
    "EncodedSample",
    "WholeSampleEncoder",
    "require_sampled_prefix",
    "plan_packs",
    "PackStream",
    "Pack",
    "StepPipeline",
    "StepRules",
    "StepBudget",
    "SessionSource",
    "RolloutIndex",
    "SegmentMaker",
    "Stale",
    "TrainedStep",
    "Collector",
    "RolloutSource",
    "GroupIndex",
    "ScoredRollout",
    "CollectedGroup",
    "Order",
    "OnFailure",
    "Partial",
    "OffScale",
    "Normalizer",
    "drop_zero_variance",
    "standardize",
    "take_rewards",
    "deliver",
    "rollout_advantages",
    "turn_advantages",
    "return_to_go_advantages",
    "value_advantages",
    "RolloutReward",
    "reward_turns",
    "TurnValue",
    "value_turns",
    "StepTable",
    "StepRecord",
    "read_step",
    "pack_again",
    "Learner",
    "LossSums",
    "StepReport",
    "ScriptedLearner",
    "TorchLearner",
    "LossKind",
    "LossSettings",
    "report_steps",
    "StepStore",
    "OptimizerSettings",
]


@pytest.mark.parametrize(("door", "names"), [(harness, PUBLIC), (harness.training, TRAINING)])
def test_the_public_names_are_these(door: ModuleType, names: list[str]) -> None:
    """No import breaks, and no name is promised, by accident: these lists change by hand."""
    assert sorted(door.__all__) == sorted(names)
    assert set(names) <= set(dir(door))


@pytest.mark.parametrize(
    ("door", "name"), [*((harness, name) for name in PUBLIC), *((harness.training, name) for name in TRAINING)]
)
def test_a_public_name_is_real_and_documented(door: ModuleType, name: str) -> None:
    """It resolves to the thing of that name in the module that the table says, and that thing has a docstring."""
    found = getattr(door, name)
    assert inspect.getdoc(found)
    if name in ("errors", "training"):
        assert found is import_module(f"harness.{name}")
    else:
        assert (found.__module__, found.__name__) == (door._HOMES[name], name)


@pytest.mark.parametrize("door", [harness, harness.training])
def test_type_checkers_see_what_programs_get(door: ModuleType) -> None:
    """The imports that only type checkers follow are the table."""
    tree = ast.parse(Path(door.__file__).read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert seen == door._HOMES | ({"errors": "harness", "training": "harness"} if door is harness else {})


@pytest.mark.parametrize("name", TRAINING)
def test_a_training_name_is_still_found_where_it_was(name: str) -> None:
    """Programs of before continue, with a warning that names the new place."""
    with pytest.warns(DeprecationWarning, match=f"harness.{name} has moved to harness.training.{name}"):
        assert getattr(harness, name) is getattr(harness.training, name)


def test_importing_harness_loads_nothing_else() -> None:
    """No module of ours but the version, and no package of others, comes with it; names are loaded when used."""
    code = "import sys; before = set(sys.modules); import harness; print(*sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    roots = {name.partition(".")[0] for name in done.stdout.split()} - {"harness"}
    assert "harness" in done.stdout.split()
    assert [name for name in done.stdout.split() if name.startswith("harness.")] == [
        "harness._front_door",
        "harness._version",
    ]
    assert roots <= sys.stdlib_module_names
    assert not roots & {"asyncio", "http", "ssl", "socket"}


@pytest.mark.parametrize(
    ("slip", "meant"),
    [
        ("SesionManager", "SessionManager"),
        ("Abortbudget", "AbortBudget"),
        ("open_engin", "open_engine"),
        ("StepPipelin", "StepPipeline"),
    ],
)
def test_a_slip_is_told_the_near_miss(slip: str, meant: str) -> None:
    """The ordinary error of an attribute that is not there says which one is."""
    with pytest.raises(AttributeError, match=f"module 'harness' has no attribute '{slip}'; did you mean .*{meant}"):
        getattr(harness, slip)


def test_a_name_like_no_other_gets_the_plain_error() -> None:
    """No guess where nothing is near; what Python itself probes for is not guessed at."""
    for name in ("zzz", "__path_", "__wrapped__"):
        with pytest.raises(AttributeError, match=f"has no attribute '{name}'$"):
            getattr(harness, name)


def test_a_learner_without_its_libraries_names_the_extra() -> None:
    """An error of the harness, as whoever trains has to catch it anyway."""
    code = "import sys; sys.modules['torch'] = None\nimport harness\n"
    code += "try: harness.training.TorchLearner\nexcept harness.errors.LearnerError as error: print(error)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'session-harness[learner]'" in done.stdout
