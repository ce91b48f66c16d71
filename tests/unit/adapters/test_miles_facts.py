"""The interface of radixark/miles 31f1ca96 as a table, against the stand-in and, where there is one, a checkout.

Read without importing: `HARNESS_MILES_SRC` names a checkout of miles, whose dependencies need not be there.
"""

import ast
import sys
from pathlib import Path

import pytest

from harness.adapters.miles.rollouts import MilesRollouts
from harness.adapters.miles.samples import FIELDS
from harness.adapters.miles.settings import COMMIT, NO_LISTS, REFUSALS
from harness.adapters.sampling import ABOUT_TEXT, NAMES
from tests.unit.adapters.conftest import MILES_CHECKOUT, STAND_INS

SOURCES = [STAND_INS, *([Path(MILES_CHECKOUT)] if MILES_CHECKOUT else [])]

CLASSES: dict[tuple[str, str], dict[str, str | None]] = {
    ("miles/utils/types.py", "Sample"): {
        "group_index": "None",
        "index": "None",
        "rollout_id": "None",
        "prompt": "''",
        "tokens": "field(default_factory=list)",
        "response": "''",
        "response_length": "0",
        "label": "None",
        "reward": "None",
        "loss_mask": "None",
        "weight_versions": "field(default_factory=list)",
        "rollout_log_probs": "None",
        "rollout_routed_experts": "None",
        "remove_sample": "False",
        "status": "Status.PENDING",
        "metadata": "field(default_factory=dict)",
        "train_metadata": "None",
        "routing_key": "None",
        "non_generation_time": "0.0",
        "prefix_cache_info": "field(default_factory=PrefixCacheInfo)",
    },
    ("miles/utils/types.py", "PrefixCacheInfo"): {"cached_tokens": "0", "total_prompt_tokens": "0"},
    ("miles/rollout/base_types.py", "GenerateFnInput"): {
        "state": None,
        "sample": None,
        "sampling_params": None,
        "evaluation": None,
    },
    ("miles/rollout/base_types.py", "GenerateFnOutput"): {"samples": None},
    ("miles/rollout/base_types.py", "RolloutFnConstructorInput"): {"args": None, "data_source": None},
    ("miles/rollout/base_types.py", "RolloutFnTrainInput"): {"weight_version": "None"},
    ("miles/rollout/base_types.py", "RolloutFnTrainOutput"): {"samples": None, "metrics": "None"},
}
"""Fields of classes, with their defaults."""

FUNCTIONS: dict[tuple[str, str], list[str]] = {
    ("miles/utils/misc.py", "call_agent_abort_hook"): ["args"],
    ("miles/rollout/inference_rollout/inference_rollout_train.py", "abort"): ["state", "pendings", "rollout_id"],
    ("miles/rollout/inference_rollout/inference_rollout_train.py", "generate_rollout_async"): [
        *("state", "rollout_id", "data_source")
    ],
    ("miles/backends/training_utils/loss_hub/logit_processors.py", "get_log_probs_and_entropy"): [
        *("logits", "args", "unconcat_tokens", "total_lengths", "response_lengths"),
        *("with_entropy", "entropy_requires_grad", "non_loss_data", "max_seq_lens"),
    ],
    ("miles/ray/rollout/train_data_conversion.py", "convert_samples_to_train_data"): [
        "args",
        "samples",
        "metadata",
        "custom_convert_samples_to_train_data_func",
        "custom_reward_post_process_func",
    ],
}
"""Parameters of functions, in their order."""

PROTOCOL = {
    "miles/rollout/generate_hub/agentic_tool_call.py": ["base_url=", "prompt=", "request_kwargs=", "metadata="],
    "miles/rollout/generate_utils/openai_endpoint_utils.py": [
        'post(f"{session_url}/sessions", {}, action="post")',
        'response["session_id"]',
        'f"{router_url}/sessions/{session_id}"',
        'f"{self.base_url}/samples"',
        'body: dict = {"max_seq_len": max_seq_len}',
        'post(self.base_url, {}, action="delete")',
    ],
}
"""What miles' own generate function for agents says to a session server."""

LISTS = {
    "miles/ray/rollout/train_data_conversion.py": [
        "def _compute_rollout_mask_sums(",
        "_normalize_rewards_by_rollout(args, samples, raw_rewards, prompt_group_sizes)",
    ],
    "miles/backends/training_utils/loss.py": ['denominators=batch.get("rollout_mask_sums", None)'],
    "miles/utils/dp_schedule.py": ["rollout_id_to_sample_index", "static path: micro-batch count"],
    "miles/backends/fsdp_utils/actor.py": ['self.train_parallel_config = {\n            "dp_size"'],
    "miles/rollout/inference_rollout/inference_rollout_eval.py": ["data.extend(sample)"],
    "miles/rollout/inference_rollout/inference_rollout_train.py": ["[sample for group in data for sample in group]"],
    "miles/rollout/inference_rollout/inference_rollout_common.py": [
        "await batched_async_rm(args, samples_need_reward, inplace_set_reward_field=True)",
        "await batched_async_rm(args, group, inplace_set_reward_field=True)",
    ],
    "miles/rollout/rm_hub/__init__.py": ["async def async_rm(args, sample: Sample, **kwargs):"],
}
"""What miles does with lists of samples: one weight for a rollout, and where it can only do with one sample."""

STATUSES = {"pending", "completed", "truncated", "aborted", "failed"}


def read(source: Path, path: str) -> ast.Module:
    return ast.parse((source / path).read_text(encoding="utf-8"))


def find(tree: ast.Module, name: str):
    return next(node for node in ast.walk(tree) if getattr(node, "name", None) == name)


@pytest.mark.parametrize("source", SOURCES, ids=str)
@pytest.mark.parametrize(("path", "name"), CLASSES)
def test_fields_and_their_defaults(source: Path, path: str, name: str) -> None:
    """Those of the table are there, with these defaults."""
    found = {
        each.target.id: None if each.value is None else ast.unparse(each.value)
        for each in find(read(source, path), name).body
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }
    expected = CLASSES[path, name]
    assert {field: found.get(field, "no such field") for field in expected} == expected


@pytest.mark.parametrize("source", SOURCES, ids=str)
@pytest.mark.parametrize(("path", "name"), FUNCTIONS)
def test_parameters(source: Path, path: str, name: str) -> None:
    taken = find(read(source, path), name).args
    assert [each.arg for each in (*taken.args, *taken.kwonlyargs)] == FUNCTIONS[path, name]


@pytest.mark.parametrize("source", SOURCES, ids=str)
def test_statuses(source: Path) -> None:
    """A session's statuses are some of miles', by the same values."""
    status = find(read(source, "miles/utils/types.py"), "Status")
    assert {ast.literal_eval(each.value) for each in status.body if isinstance(each, ast.Assign)} == STATUSES


@pytest.mark.parametrize("source", SOURCES, ids=str)
def test_every_sampling_parameter_of_miles_is_known(source: Path) -> None:
    made = find(
        read(source, "miles/rollout/inference_rollout/inference_rollout_common.py"), "compute_sampling_params"
    ).body[-1]
    assert {each.arg for each in made.value.keywords} <= NAMES.keys() | ABOUT_TEXT


@pytest.mark.parametrize("source", SOURCES, ids=str)
def test_an_abort_sets_the_state_before_it_ends_the_engines(source: Path) -> None:
    """And asks the agents afterwards: the order that the adapter's watch is for."""
    body = ast.unparse(find(read(source, "miles/rollout/inference_rollout/inference_rollout_train.py"), "abort"))
    engines = "abort_request" if "abort_request" in body else "abort_engines"
    assert body.index("state.aborted = True") < body.index(engines) < body.index("call_agent_abort_hook(")


@pytest.mark.parametrize("source", SOURCES, ids=str)
def test_a_rollout_function_has_its_state(source: Path) -> None:
    """By this name; it is opened before the first step."""
    path = "miles/rollout/inference_rollout/inference_rollout_common.py"
    assert "self.state = GenerateState(" in ast.unparse(find(read(source, path), "InferenceRolloutFn"))


@pytest.mark.parametrize("source", SOURCES, ids=str)
def test_samples_of_a_rollout_share_a_reward(source: Path) -> None:
    """Or miles refuses the step: what `--harness-selection` has to keep."""
    path = source / "miles/ray/rollout/train_data_conversion.py"
    assert "must share one reward" in path.read_text(encoding="utf-8")


@pytest.mark.skipif(MILES_CHECKOUT is None, reason="HARNESS_MILES_SRC names no checkout; no stand-in has these lines")
def test_a_checkout_has_the_options_that_are_refused_and_speaks_to_a_session_server_as_ours_understands() -> None:
    """An option that miles has renamed would never be refused; its generate function needs SGLang to be called."""
    options = {"miles/utils/arguments.py": [f'"{each.option}"' for each in (*REFUSALS, *NO_LISTS)]}
    for path, lines in {**PROTOCOL, **LISTS, **options}.items():
        text = (Path(str(MILES_CHECKOUT)) / path).read_text(encoding="utf-8")
        assert [line for line in lines if line not in text] == [], path


def test_the_table_covers_what_the_adapter_touches() -> None:
    """A field that is read or written has a line above."""
    assert CLASSES["miles/utils/types.py", "Sample"].keys() >= FIELDS
    assert len(COMMIT) == 8


def test_importing_the_adapter_imports_no_framework() -> None:
    """Miles brings torch and ray; whoever reads the options does not."""
    assert MilesRollouts.__module__ in sys.modules
    assert "miles" not in sys.modules
