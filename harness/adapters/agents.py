"""The agent that an option of a trainer names: a program, or a function that can be imported."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from harness.errors import AdapterError, ScenarioError
from harness.rollouts.agents.programs import bundled_agent
from harness.samples.rollout import OutcomeKind, Rollout
from harness.types import Json

AGENT_RESULT = "agent_result"
"""Key in a sample's metadata of what a program left as its result.

The model can write that file, so it sets neither reward nor other metadata unless the trainer trusts it by name.
"""

LoadFunction = Callable[[Any], Any]
"""Finds what a dotted path names, as the framework does; None for none."""

AGENT_METADATA = "agent"
"""Key in a sample's metadata of the object whose items become the metadata of a program.

A program acts for the model, which must not read the answer there; functions are trusted with everything.
"""


def is_script(name: str) -> bool:
    """Whether `name` is the path of a script or of a profile, by how it ends."""
    return name.endswith((".py", ".toml"))


def find_script(name: str, option: str) -> Path:
    """The script or profile that ships under `name`, or the one at that path. Raises `AdapterError` naming `option`."""
    script = Path(name)
    try:
        script = script if is_script(name) else bundled_agent(name)
    except ScenarioError as error:
        raise AdapterError(f"{option}: {error.message}") from error
    if not script.is_file():
        raise AdapterError(f"{option}: no agent script at {script}")
    return script


def find_function(path: str | None, option: str, load: LoadFunction) -> Callable[..., Any]:
    """The function at that dotted path. Raises `AdapterError` naming `option`."""
    try:
        function = load(path)
    except Exception as error:  # importing runs the module: it may raise anything
        raise AdapterError(f"{option} {path}: {type(error).__name__}: {error}") from error
    if not callable(function):
        raise AdapterError(f"{option} {path}: expected a function, got {type(function).__name__}")
    return function  # type: ignore[no-any-return]  # it is whatever the path names


def stated_number(value: object) -> float | None:
    """A number that an agent states in its result, such as its `reward`; None for anything else."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if is_number else None  # type: ignore[arg-type]  # a number, as of the line above


def stated_reward(rollout: Rollout) -> float | None:
    """The `reward` of the agent's result; None where the rollout was ended before the agent could state one.

    Raises `AdapterError` where the agent ended by itself without one: it never states any.
    """
    stated = (rollout.agent_result or {}).get("reward")
    reward = stated_number(stated)
    if reward is None and rollout.outcome.kind is OutcomeKind.FINISHED:
        raise AdapterError(f"expected a number in `reward` of the agent's result, got {stated!r}")
    return reward


def program_metadata(metadata: Mapping[str, Any], place: str) -> Json:
    """The items that a program may know of. Raises `AdapterError` naming `place` where they are no object."""
    given = metadata.get(AGENT_METADATA, {})
    if not isinstance(given, dict):
        raise AdapterError(f"{place}[{AGENT_METADATA!r}]: expected an object, got {type(given).__name__}")
    return given
