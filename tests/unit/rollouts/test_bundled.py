"""Agents and scenarios are found wherever the package is installed."""

from pathlib import Path

import pytest

from harness.errors import HarnessError, ScenarioError
from harness.rollouts.agents.programs import bundled_agent, bundled_directory


def make_installation(root: Path, *directories: str) -> Path:
    """A `harness` package below `root`, with directories around it."""
    for directory in ("harness", *directories):
        (root / directory).mkdir(parents=True)
    return root / "harness"


def test_a_wheel_carries_its_own(tmp_path: Path):
    """They win over a folder that happens to lie beside the package."""
    package = make_installation(tmp_path, "harness/_bundled/agents", "agents")

    assert bundled_directory("agents", package=package) == package / "_bundled" / "agents"


def test_an_editable_install_uses_the_repository(tmp_path: Path):
    package = make_installation(tmp_path, "scenarios")

    assert bundled_directory("scenarios", package=package) == tmp_path / "scenarios"


def test_a_broken_installation_is_named(tmp_path: Path):
    with pytest.raises(HarnessError, match=r"_bundled/agents and .*/agents; reinstall"):
        bundled_directory("agents", package=make_installation(tmp_path))


def test_bundled_agents_are_found_by_name():
    assert bundled_agent("plain_chat").parent.name == "plain_chat"
    assert bundled_agent("react_chat").is_file()


def test_an_unknown_agent_is_answered_with_the_closest_one():
    """So that a typing mistake is seen at once."""
    with pytest.raises(ScenarioError, match="'plain_caht'; did you mean 'plain_chat'"):
        bundled_agent("plain_caht")
