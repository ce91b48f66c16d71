"""The table of kinds, and plug-ins: `MODULE:FACTORY`, called with a `SandboxSpec` and a `Place`."""

from collections.abc import Callable
from importlib import import_module

from harness.errors import ScenarioError
from harness.rollouts.sandboxes.bwrap import BwrapSandbox
from harness.rollouts.sandboxes.container import ContainerSandbox
from harness.rollouts.sandboxes.sandbox import BWRAP, CONTAINERS, Place, Sandbox
from harness.rollouts.sandboxes.spec import SandboxSpec

SandboxFactory = Callable[[SandboxSpec, Place], Sandbox]
"""Maker of a box that is not started."""

_KINDS: dict[str, SandboxFactory] = {BWRAP: BwrapSandbox, **dict.fromkeys(CONTAINERS, ContainerSandbox)}


def factory_of(spec: SandboxSpec) -> SandboxFactory:
    """Return the factory of a kind. Raises `ScenarioError`."""
    if spec.kind in _KINDS:
        return _KINDS[spec.kind]
    module, _, name = spec.kind.partition(":")
    try:
        factory: SandboxFactory = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ScenarioError(f"sandbox: {spec.kind} cannot be loaded: {error}; expected MODULE:FACTORY") from error
    return factory
