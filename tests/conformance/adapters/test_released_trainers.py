"""The interfaces of areal 1.0.4 and verl 0.9.1 as a table, against the released wheels and the stand-ins.

Read without importing: the wheels need GPUs' worth of dependencies, which are not there. pip downloads them once.
"""

import ast
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from harness.adapters.areal import workflow
from harness.adapters.verl import agent_loop
from harness.adapters.verl.output import FIELDS
from harness.machine.cache import cache_directory
from harness.machine.disk import hold_lock
from tests.unit.adapters.conftest import STAND_INS

WHEELS = {"areal": f"areal-{workflow.VERSION}-py3-none-any.whl", "verl": f"verl-{agent_loop.VERSION}-py3-none-any.whl"}
AREAL, VERL = "areal", "verl"
LOOPS = "verl/experimental/agent_loop/agent_loop.py"

FIELDS_OF: dict[tuple[str, str], dict[str, str | None]] = {
    ("areal/api/cli_args.py", "GenerationHyperparameters"): {
        "n_samples": "1",
        "max_new_tokens": "16384",
        "min_new_tokens": "0",
        "max_tokens": "32768",
        "greedy": "False",
        "top_p": "1.0",
        "top_k": "int(100000000.0)",
        "temperature": "1.0",
        "stop_token_ids": "list",
        "ignore_eos": "False",
        "stop": "None",
        "frequency_penalty": "0.0",
        "use_beam_search": "False",
    },
    (LOOPS, "AgentLoopOutput"): {
        "prompt_ids": None,
        "response_ids": None,
        "response_mask": None,
        "response_logprobs": "None",
        "routed_experts": "None",
        "reward_score": "None",
        "num_turns": "0",
        "metrics": None,
        "extra_fields": "{}",
    },
    (LOOPS, "AgentLoopMetrics"): {
        "generate_sequences": "0.0",
        "tool_calls": "0.0",
        "compute_score": "0.0",
        "num_preempted": "-1",
    },
}
"""Fields of classes, with their defaults."""

PARAMETERS: dict[tuple[str, str, str], list[str]] = {
    ("areal/api/workflow_api.py", "RolloutWorkflow", "arun_episode"): ["self", "engine", "data"],
    ("areal/infra/utils/concurrent.py", "", "register_loop_cleanup"): ["callback", "loop"],
    ("areal/infra/workflow_context.py", "", "stat_scope"): [],
    ("areal/utils/stats_tracker.py", "", "get"): ["name"],
}
"""Of functions, and of methods of a class."""

RELEASED: dict[tuple[str, str], list[str]] = {
    (AREAL, "areal/trainer/rl_trainer.py"): [
        "workflow: WorkflowLike | None = None,",
        "workflow_kwargs: dict[str, Any] | None = None,",
        "train_dataset: Dataset | None = None,",
    ],
    # A class that a path names is a workflow by `issubclass`, and gets the arguments as keywords.
    (AREAL, "areal/infra/remote_inf_engine.py"): ["imported_obj, RolloutWorkflow", "imported_obj(**workflow_kwargs)"],
    (AREAL, "areal/infra/workflow_executor.py"): ['required_keys = {"input_ids", "attention_mask"}'],
    (AREAL, "areal/api/engine_api.py"): ["def get_version(self) -> int:"],
    (AREAL, "areal/__init__.py"): ["workflow_context", "__version__", "PPOTrainer"],
    # Columns are rolled by AReaL: at the token itself they are what its own workflows make.
    (AREAL, "areal/trainer/ppo/actor.py"): ['torch.roll(data["logprobs"], shifts=-1, dims=-1)'],
    (AREAL, "areal/workflow/multi_turn.py"): [
        f"{name}=torch.tensor({value}, dtype=torch.{dtype})"
        for name, value, dtype in [
            ("input_ids", "seq", "int32"),
            ("logprobs", "logprobs", "float32"),
            ("loss_mask", "loss_mask", "int32"),
            ("versions", "versions", "int32"),
            ("rewards", "reward", "float32"),
        ]
    ],
    (VERL, LOOPS): [
        "async def run(self, sampling_params: dict[str, Any], **kwargs) -> AgentLoopOutput:",
        *(
            f"{name}="
            for name in ("trainer_config", "server_manager", "tokenizer", "processor", "hf_model_type", "dataset_cls")
        ),
        "data_config=DictConfigWrap(self.config.data)",
        "tools=ToolListWrap(self.tools)",
        "self.rollout_config = self.config.actor_rollout_ref.rollout",
        "max_length=self.rollout_config.prompt_length",
        "max_length=self.rollout_config.response_length",
        *(f"{name}=config.{name}," for name in ("temperature", "top_p", "top_k")),
        "repetition_penalty=1.0,",
        "logprobs=config.calculate_log_probs,",
        "await agent_loop.run(sampling_params, **kwargs)",
    ],
    # A fixed number of rows is one prompt's: several rows of one rollout would shift them.
    (AREAL, "areal/utils/data.py"): ["s = slice(i * self.group_size, (i + 1) * self.group_size)"],
    (VERL, "verl/trainer/ppo/v1/agent_loop_tq.py"): [
        '.get("min_global_steps")',
        '.get("max_global_steps")',
        "session_id=i, **prompt",
        "self, output: AgentLoopOutput | list[AgentLoopOutput], validate, **kwargs",
        'output.extra_fields["reward_extra_info"] = final_output.extra_fields["reward_extra_info"]',
    ],
    # The last output of a session is in its group, and its advantage is that of the others, in a token that is trained.
    (VERL, "verl/trainer/ppo/v1/utils.py"): [
        "if adv_estimator != core_algos.AdvantageEstimator.GRPO:",
        'first_nnz_indices = final_data.batch["response_mask"].argmax(dim=1)',
    ],
    (VERL, "verl/trainer/ppo/core_algos.py"): [
        *(f'= "{name}"' for name in ("gae", "grpo", "reinforce_plus_plus")),
        'elif loss_agg_mode == "seq-mean-token-mean":',
    ],
    (VERL, "verl/trainer/ppo/v1/trainer_base.py"): ["(global_steps - 1) - max_global_steps"],
    (VERL, "verl/workers/config/rollout.py"): ["enable_rollout_routing_replay: bool = False"],
    (VERL, "verl/trainer/config/rollout/rollout.yaml"): ["agent_loop_config_path:", "default_agent_loop:"],
}
"""Text of the wheels that the adapters stand on, where no stand-in has its like."""


def released(trainer: str) -> zipfile.Path:
    """The wheel, downloaded once on this computer; what it depends on is not."""
    folder = cache_directory() / "wheels"
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / WHEELS[trainer]
    with hold_lock(folder / f"{wheel.name}.lock"):
        if not wheel.exists():
            requirement = "==".join(wheel.name.split("-")[:2])
            options = ["--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--quiet", f"--dest={folder}"]
            subprocess.run([sys.executable, "-m", "pip", "download", *options, requirement], check=True, timeout=120)
    return zipfile.Path(wheel)


def sources(path: str) -> list[Path | zipfile.Path]:
    """The file at `path` as it stands in, and as it was released."""
    return [STAND_INS / path, released(path.partition("/")[0]) / path]


def find(source: Path | zipfile.Path, *names: str) -> ast.AST:
    """The definition of that name in a file; of the last one inside the one before it."""
    found: ast.AST = ast.parse(source.read_text(encoding="utf-8"))
    for name in filter(None, names):
        found = next(node for node in ast.walk(found) if getattr(node, "name", None) == name)
    return found


def default(value: ast.expr | None) -> str | None:
    """Of a field, as text; None where a value has to be given."""
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "field":
        stated = {each.arg: each.value for each in value.keywords}
        return ast.unparse(stated.get("default", stated.get("default_factory")))
    return None if value is None else ast.unparse(value)


@pytest.mark.parametrize(("path", "name"), FIELDS_OF)
def test_fields_and_their_defaults(path: str, name: str) -> None:
    """Those of the table, in the wheel and in the stand-in."""
    for source in sources(path):
        found = {
            each.target.id: default(each.value)
            for each in find(source, name).body
            if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
        }
        expected = FIELDS_OF[path, name]
        assert {field: found.get(field, "no such field") for field in expected} == expected, source


@pytest.mark.parametrize(("path", "of", "name"), PARAMETERS)
def test_parameters(path: str, of: str, name: str) -> None:
    """Names and order, in the wheel and in the stand-in."""
    for source in sources(path):
        taken = find(source, of, name).args
        assert [each.arg for each in (*taken.args, *taken.kwonlyargs)] == PARAMETERS[path, of, name], source


@pytest.mark.parametrize(("trainer", "path"), RELEASED)
def test_what_the_adapters_stand_on_was_released(trainer: str, path: str) -> None:
    """A line that has changed is named."""
    text = (released(trainer) / path).read_text(encoding="utf-8")
    assert [line for line in RELEASED[trainer, path] if line not in text] == []


def test_an_agent_loop_takes_what_verl_hands_over() -> None:
    """Every argument of verl's own loops, and no other one has to be there."""
    taken = find(released(VERL) / LOOPS, "AgentLoopBase", "__init__").args
    [ours] = [
        each
        for each in ast.walk(ast.parse(Path(agent_loop.__file__).read_text(encoding="utf-8")))
        if getattr(each, "name", None) == "__init__"
    ]
    names = [each.arg for each in ours.args.kwonlyargs]
    assert {each.arg for each in taken.args} - {"self"} <= {*names}


def test_the_table_covers_what_the_adapter_writes() -> None:
    """A field of an output has a line above."""
    assert FIELDS_OF[LOOPS, "AgentLoopOutput"].keys() >= FIELDS
