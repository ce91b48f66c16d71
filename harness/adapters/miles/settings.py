"""Options of the adapter, and unsupported options of miles, which raise. Pure."""

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from harness.adapters.sampling import FILTERED, is_filter
from harness.adapters.trainer_sessions import ADMIN_TOKEN_VARIABLE, DEADLINE_S, TrainerSettings
from harness.errors import AdapterError
from harness.machine.log import get_logger
from harness.rollouts.client.connections import SessionServerAddress
from harness.samples.delivery import DEPRECATED_SELECTIONS, Selection
from harness.sessions.session_config import Recorded

COMMIT = "31f1ca96"
"""Commit of radixark/miles whose interface this module uses."""

SELECTION_DEPRECATED = "miles_selection_deprecated"

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class MilesSettings(TrainerSettings):
    agent_function_path: str | None
    """From `--custom-agent-function-path`; None if `agent` is a program."""
    agent: str | None
    """Bundled agent, script, profile or command line."""
    max_seq_len: int | None
    """Tokens of a session's longest branch, prompt included."""
    selection: str | None
    """`Selection`, or a server's path; None: from the profile."""
    trusts_agent: bool
    """True if the agent's result sets reward and metadata."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--custom-agent-function-path", type=str, default=None, help="The agent, by miles' own contract.")
    add("--max-seq-len", type=int, default=None, help="Maximum tokens of a session's sequence, prompt included.")
    add("--harness-session-server", type=str, default=None, help="URL of the session server.")
    add("--harness-agent", type=str, default=None, help="An agent, script or command line, in place of a function.")
    add("--harness-agent-env", type=str, nargs="*", default=[], help="NAME=VALUE, for the environment of a program.")
    add("--harness-deadline", type=float, default=DEADLINE_S, help="Deadline of an agent, in seconds.")
    add("--harness-resume-attempts", type=int, default=0, help="Restarts of an agent after its sandbox is lost.")
    add("--harness-matching", type=str, nargs="*", default=None, help="Differences in histories to ignore.")
    add("--harness-selection", type=str, default=None, help="Which branches become samples: `all`, `one`, or a path.")
    add("--harness-trust-agent-result", action="store_true", help="A program's result sets the reward and metadata.")
    add("--harness-workdir", type=Path, default=None, help="Keep the working directories of rollouts here.")


def read_settings(args: Any) -> MilesSettings:
    """Read the settings. Raises `AdapterError` naming the option."""
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
        server=SessionServerAddress(server, os.environ.get(ADMIN_TOKEN_VARIABLE)),
        agent_function_path=function_path,
        agent=agent,
        agent_env=tuple(env.items()),
        deadline_s=getattr(args, "harness_deadline", DEADLINE_S),
        max_seq_len=getattr(args, "max_seq_len", None),
        matching=None if matching is None else tuple(matching),
        selection=_find_selection(args),
        workdir=None if workdir is None else Path(workdir),
        trusts_agent=not agent or bool(getattr(args, "harness_trust_agent_result", False)),
        resume_attempts=getattr(args, "harness_resume_attempts", 0),
        record=tuple(kind for kind, is_wanted in _RECORDED.items() if is_wanted(args)),
    )


def read_variables(assignments: Sequence[str]) -> dict[str, str]:
    """Parse `NAME=VALUE` items. Raises `AdapterError`, without values."""
    variables: dict[str, str] = {}
    for assignment in assignments:
        name, equals, value = str(assignment).partition("=")
        if not name or not equals:
            raise AdapterError(f"--harness-agent-env: expected NAME=VALUE, got one that begins with {name[:16]!r}")
        variables[name] = value
    return variables


class Refusal(NamedTuple):
    option: str
    reason: str
    is_refused: Callable[[Any], object] = bool
    applies: Callable[[Any], object] = lambda _: True

    def is_set(self, args: Any) -> bool:
        value = getattr(args, self.option.removeprefix("--").replace("-", "_"), None)
        return bool(self.is_refused(value) and self.applies(args))


def _begins(prefix: str) -> Callable[[Any], bool]:
    return lambda value: str(value).startswith(prefix)


def _is_of_slime(args: Any) -> bool:
    return _begins("harness.adapters.slime")(getattr(args, "custom_generate_function_path", None))


def _needs_logprobs(args: Any) -> bool:
    # The loss then takes ratios to the rollout's logprobs.
    return bool(getattr(args, "use_tis", False) or getattr(args, "use_rollout_logprobs", False))


def _takes_masks(args: Any) -> bool:
    # slime's loss is over the kept tokens unless `--rollout-top-p` is 1; miles' is over all.
    return _is_of_slime(args) and is_filter("top_p", getattr(args, "rollout_top_p", None))


def _loses_filter(args: Any) -> bool:
    return _needs_logprobs(args) and not _takes_masks(args)


_RECORDED: Mapping[Recorded, Callable[[Any], object]] = {
    Recorded.ROUTED_EXPERTS: lambda args: getattr(args, "use_rollout_routing_replay", None),
    Recorded.SAMPLING_MASK: _takes_masks,
}

REFUSALS = (
    Refusal("--use-rollout-indexer-replay", "sessions record no indexer choices"),
    Refusal("--lora-rank", "sessions name no adapter to the engine"),
    Refusal("--lora-adapter-path", "sessions name no adapter to the engine"),
    Refusal("--multi-lora-n-adapters", "sessions name no adapter to the engine"),
    Refusal("--multimodal-keys", "sessions serve text only"),
    Refusal("--partial-rollout", "an aborted rollout starts over"),
    Refusal("--apply-chat-template", "the session server renders the messages itself"),
    Refusal("--eval-num-gpus", "the engines of an evaluation are not behind the session server"),
    Refusal("--rollout-top-k", FILTERED, partial(is_filter, "top_k"), _loses_filter),
    Refusal("--rollout-top-p", FILTERED, partial(is_filter, "top_p"), _loses_filter),
)

NO_LISTS = (
    Refusal("--group-rm", "groups of single samples are scored"),
    Refusal("--recompute-logprobs-via-prefill", "single samples are scored"),
    Refusal(
        "--use-dynamic-batch-size", "without it a step has a fixed number of samples", lambda value: value is False
    ),
    Refusal("--train-backend", "fsdp counts samples, not rollouts", _begins("fsdp")),
    Refusal(
        "--dynamic-sampling-filter-path",
        "the filters of slime read single samples",
        _begins("slime.rollout.filter_hub."),
    ),
    Refusal("--rollout-function-path", "it finds no ABORTED sample in a list", _begins("slime.rollout.fully_async")),
    Refusal("--log-passrate", "slime counts samples, not rollouts", applies=_is_of_slime),
)
"""Options that require one sample per rollout."""


def require_kept(args: Any) -> None:
    """Raise `AdapterError` naming the first unsupported option."""
    for refusal in REFUSALS:
        if refusal.is_set(args):
            raise AdapterError(f"{refusal.option} is not supported: {refusal.reason}")


def _find_selection(args: Any) -> str | None:
    """Return the given selection, `one` if the framework takes no lists, or None. Raises `AdapterError`."""
    # miles passes lists to `--custom-rm-path`, and most such functions expect single samples.
    stated = getattr(args, "harness_selection", None)
    refusal = next((each for each in NO_LISTS if each.is_set(args)), None)
    if stated is None:
        return Selection.ONE if refusal or getattr(args, "custom_rm_path", None) else None
    selection = DEPRECATED_SELECTIONS.get(stated, stated)
    if selection != stated:
        _warn_deprecated(stated, selection)
    elif selection not in list(Selection) and ":" not in selection:
        raise AdapterError(
            f"--harness-selection: expected {', '.join(Selection)}, or package.module:function; got {selection!r}"
        )
    if refusal and selection != Selection.ONE:
        raise AdapterError(f"{refusal.option} is not supported: {refusal.reason}; set --harness-selection one")
    return str(selection)


@cache
def _warn_deprecated(stated: str, instead: str) -> None:
    _log.warning(SELECTION_DEPRECATED, stated=stated, instead=str(instead))
