"""The agent of a trainer's option: a program or function."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.errors import AdapterError, ScenarioError
from harness.rollouts.agents.programs import bundled_agent, find_command, split_command
from harness.samples.rollout import OutcomeKind, Rollout, describe_judgement, stamp_judgement, stated_number
from harness.types import Json

AGENT_RESULT = "agent_result"
"""Metadata key of a program's result. The model can write it, so only a trainer that trusts it takes its reward."""

LoadFunction = Callable[[Any], Any]
"""Function that resolves a dotted path as the framework does."""

AGENT_METADATA = "agent"
"""Metadata key of the object that programs may see. A program acts for the model, which must not read the answer."""


Program = Path | tuple[str, ...]
"""Script or profile, or a command line."""


def is_program(name: str) -> bool:
    """Return False for a dotted path."""
    return "." not in name or name.endswith((".py", ".toml")) or "/" in name or len(name.split()) > 1


def find_program(name: str, option: str) -> Program:
    """Return a bundled agent, a script, a profile or a command line. Raises `AdapterError` naming `option`."""
    try:
        words = split_command(name)
        command = find_command(words, Path())
        script = Path(name) if not words and name.endswith((".py", ".toml")) else None
        found = command or script or bundled_agent(name)
    except (ScenarioError, ValueError) as error:  # a quote without its end
        raise AdapterError(f"{option}: {error}") from error
    if isinstance(found, Path) and not found.is_file():
        raise AdapterError(f"{option}: no agent script at {found}")
    return found


def find_function(path: str | None, option: str, load: LoadFunction) -> Callable[..., Any]:
    """Import a function. Raises `AdapterError` naming `option`."""
    try:
        function = load(path)
    except Exception as error:  # importing runs the module: it may raise anything
        raise AdapterError(f"{option} {path}: {type(error).__name__}: {error}") from error
    if not callable(function):
        raise AdapterError(f"{option} {path}: expected a function, got {type(function).__name__}")
    return function  # type: ignore[no-any-return]  # it is what the path names


def stated_reward(rollout: Rollout) -> float | None:
    """Return the agent's `reward`, or None if the rollout was cut short. Raises `AdapterError` without one."""
    stated = (rollout.agent_result or {}).get("reward")
    reward = stated_number(stated)
    if reward is None and rollout.outcome.kind is OutcomeKind.FINISHED:
        raise AdapterError(f"expected a number in `reward` of the agent's result, got {stated!r}")
    return reward


def stamp_stated(rollout: Rollout) -> Rollout:
    """Return `rollout` with the `score` and the `reason` of the agent's result on its samples."""
    result = rollout.agent_result or {}
    score, reason = result.get("score"), result.get("reason")
    named = score if isinstance(score, dict) else {"score": score}
    figures = {name: figure for name, given in named.items() if (figure := stated_number(given)) is not None}
    judgement = describe_judgement(figures, reason if isinstance(reason, str) else "")
    return replace(rollout, samples=stamp_judgement(rollout.samples, judgement))


def program_metadata(metadata: Mapping[str, Any], place: str) -> Json:
    """Return a program's metadata. Raises `AdapterError` naming `place` unless it is an object."""
    given = metadata.get(AGENT_METADATA, {})
    if not isinstance(given, dict):
        raise AdapterError(f"{place}[{AGENT_METADATA!r}]: expected an object, got {type(given).__name__}")
    return given
