"""The adapter's options, and those of miles that cannot be kept beside it. Pure.

Refused by name rather than ignored: a run whose routing is not replayed, or whose ratios are taken to logprobs of
another distribution, trains to its end and is worth nothing.
"""

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from harness.adapters.sampling import FILTERED, is_filter
from harness.adapters.trainer_sessions import ADMIN_TOKEN_VARIABLE
from harness.errors import AdapterError
from harness.samples.merge import Selection

COMMIT = "31f1ca96"
"""Of radixark/miles: the interface that everything here is written for."""

DEADLINE_S = 1800.0


@dataclass(frozen=True, slots=True)
class MilesSettings:
    """The options of a run, as far as the adapter is concerned."""

    session_server: str
    admin_token: str | None
    agent_function_path: str | None
    """Of miles' own `--custom-agent-function-path`; None where `agent` is a program."""
    agent: str | None
    """Name of a bundled agent, or path of a script."""
    agent_env: Mapping[str, str]
    """Added to the environment of a program."""
    deadline_s: float
    max_seq_len: int | None
    """Tokens of a session's longest branch, prompt included."""
    matching: tuple[str, ...] | None
    """None: that of the agent's profile."""
    selection: Selection | None
    """None: that of the agent's profile, and of its samples the last one."""
    workdir: Path | None
    """Where the directories of rollouts stay; None: they go with their rollouts."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `Generate`; miles calls this while it builds its parser."""
    add = parser.add_argument
    add("--custom-agent-function-path", type=str, default=None, help="The agent, by miles' own contract.")
    add("--max-seq-len", type=int, default=None, help="Most tokens of a session's sequence, prompt included.")
    add("--harness-session-server", type=str, default=None, help="URL of the session server.")
    add("--harness-agent", type=str, default=None, help="A bundled agent or a script, in place of an agent function.")
    add("--harness-agent-env", type=str, nargs="*", default=[], help="NAME=VALUE, for the environment of a program.")
    add("--harness-deadline", type=float, default=DEADLINE_S, help="Seconds that an agent may take.")
    add("--harness-matching", type=str, nargs="*", default=None, help="Differences in histories that do not count.")
    add(
        "--harness-selection",
        type=str,
        choices=[str(each) for each in Selection],
        default=None,
        help="Which branches of a session become samples; another one than `last` returns a list for each rollout.",
    )
    add("--harness-workdir", type=Path, default=None, help="Keep the working directories of rollouts here.")


def read_settings(args: Any) -> MilesSettings:
    """The settings in `args`, those of miles; options that were never declared have their defaults.

    Raises `AdapterError` that names the option it cannot go on with.
    """
    server = getattr(args, "harness_session_server", None)
    if not server:
        raise AdapterError("--harness-session-server: expected the URL of a session server (`harness serve`), got none")
    require_kept(args)
    function_path, agent = getattr(args, "custom_agent_function_path", None), getattr(args, "harness_agent", None)
    workdir, matching = getattr(args, "harness_workdir", None), getattr(args, "harness_matching", None)
    env = read_variables(getattr(args, "harness_agent_env", ()))
    if bool(function_path) == bool(agent):
        raise AdapterError("expected one of --custom-agent-function-path and --harness-agent")
    if env and not agent:
        raise AdapterError("--harness-agent-env: a function has no environment of its own; it is for --harness-agent")
    return MilesSettings(
        session_server=server,
        admin_token=os.environ.get(ADMIN_TOKEN_VARIABLE),
        agent_function_path=function_path,
        agent=agent,
        agent_env=env,
        deadline_s=getattr(args, "harness_deadline", DEADLINE_S),
        max_seq_len=getattr(args, "max_seq_len", None),
        matching=None if matching is None else tuple(matching),
        selection=_selection(args),
        workdir=None if workdir is None else Path(workdir),
    )


def read_variables(assignments: Sequence[str]) -> dict[str, str]:
    """The variables of these `NAME=VALUE`. Raises `AdapterError` for anything else; values are not in its message."""
    variables: dict[str, str] = {}
    for assignment in assignments:
        name, equals, value = str(assignment).partition("=")
        if not name or not equals:
            raise AdapterError(f"--harness-agent-env: expected NAME=VALUE, got one that begins with {name[:16]!r}")
        variables[name] = value
    return variables


def _selection(args: Any) -> Selection | None:
    name = getattr(args, "harness_selection", None)
    if name is None:
        return None
    if name not in list(Selection):
        raise AdapterError(f"--harness-selection: expected one of {', '.join(Selection)}, got {name!r}")
    return Selection(name)


def is_single(selection: Selection | None) -> bool:
    """Whether a rollout makes one sample of miles', and no list."""
    return selection is None or selection is Selection.LAST


class Refusal(NamedTuple):
    """An option of miles that cannot be kept."""

    option: str
    is_set: Callable[[Any], object]
    """From miles' arguments."""
    reason: str


def _set(name: str) -> Callable[[Any], object]:
    return lambda args: getattr(args, name, None)


def _needs_logprobs(args: Any) -> bool:
    """The loss takes ratios to the logprobs of the rollout."""
    return bool(getattr(args, "use_tis", False) or getattr(args, "use_rollout_logprobs", False))


REFUSALS = (
    Refusal("--use-rollout-routing-replay", _set("use_rollout_routing_replay"), "sessions record no routed experts"),
    Refusal("--use-rollout-indexer-replay", _set("use_rollout_indexer_replay"), "sessions record no indexer choices"),
    Refusal("--lora-rank", _set("lora_rank"), "sessions name no adapter to the engine"),
    Refusal("--lora-adapter-path", _set("lora_adapter_path"), "sessions name no adapter to the engine"),
    Refusal("--multi-lora-n-adapters", _set("multi_lora_n_adapters"), "sessions name no adapter to the engine"),
    Refusal("--multimodal-keys", _set("multimodal_keys"), "sessions serve text only"),
    Refusal("--partial-rollout", _set("partial_rollout"), "a rollout that was cut short begins anew"),
    Refusal("--apply-chat-template", _set("apply_chat_template"), "the session server renders the messages itself"),
    Refusal("--eval-num-gpus", _set("eval_num_gpus"), "the engines of an evaluation are not behind the session server"),
    Refusal(
        "--rollout-top-k",
        lambda args: _needs_logprobs(args) and is_filter("top_k", getattr(args, "rollout_top_k", None)),
        FILTERED,
    ),
    Refusal(
        "--rollout-top-p",
        lambda args: _needs_logprobs(args) and is_filter("top_p", getattr(args, "rollout_top_p", None)),
        FILTERED,
    ),
    Refusal(
        "--group-rm",
        lambda args: getattr(args, "group_rm", False) and not is_single(_selection(args)),
        "miles scores groups of samples, and --harness-selection makes lists of them",
    ),
)


def require_kept(args: Any) -> None:
    """Raises `AdapterError` naming the first option in `args` that cannot be kept."""
    for refusal in REFUSALS:
        if refusal.is_set(args):
            raise AdapterError(f"{refusal.option} cannot be kept: {refusal.reason}")
