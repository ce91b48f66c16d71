"""Packages that the base install lacks."""

from importlib.util import find_spec

from harness.errors import ScenarioError


def require_package(name: str, extra: str, purpose: str) -> None:
    """Raise `ScenarioError` if the package is not installed."""
    if find_spec(name) is None:
        raise ScenarioError(
            f"{purpose}: expected the package {name}, found none: pip install 'session-harness[{extra}]'"
        )
