"""The multi-turn agent session harness: agents as processes in, token-exact training samples out.

The names in `__all__`, and those of `harness.training`, are the whole public interface. The modules below may move.
Names load on first use, so `import harness` takes milliseconds and imports neither torch nor an HTTP stack.
"""

import warnings
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING

from harness._front_door import lazy_loader
from harness._version import __version__ as __version__

if TYPE_CHECKING:
    from harness import errors as errors
    from harness import training as training
    from harness.adapters.ray.node import NodeSetup as NodeSetup
    from harness.adapters.ray.rollouts import NodeRollout as NodeRollout
    from harness.adapters.ray.rollouts import RayRollouts as RayRollouts
    from harness.engines.base import PauseMode as PauseMode
    from harness.engines.base import TokenProvider as TokenProvider
    from harness.engines.connect import open_engine as open_engine
    from harness.engines.examine.comparison import check_logprobs_close as check_logprobs_close
    from harness.engines.huggingface.provider import HuggingFaceTokenProvider as HuggingFaceTokenProvider
    from harness.engines.pool.pool import EnginePool as EnginePool
    from harness.engines.remote.sglang import SGLangTokenProvider as SGLangTokenProvider
    from harness.engines.remote.vllm import VLLMTokenProvider as VLLMTokenProvider
    from harness.engines.scripted import Script as Script
    from harness.engines.scripted import ScriptedEngine as ScriptedEngine
    from harness.engines.scripted import ScriptedFault as ScriptedFault
    from harness.engines.scripted import ScriptStep as ScriptStep
    from harness.engines.teachers import TeacherSpec as TeacherSpec
    from harness.errors import HarnessError as HarnessError
    from harness.lab.models.resolve import resolve_model as resolve_model
    from harness.rollouts.agents.programs import bundled_agent as bundled_agent
    from harness.rollouts.agents.programs import prepare_agent as prepare_agent
    from harness.rollouts.agents.task import AgentTask as AgentTask
    from harness.rollouts.agents.task import FunctionAgent as FunctionAgent
    from harness.rollouts.agents.task import ProgramAgent as ProgramAgent
    from harness.rollouts.client.connections import SessionServerAddress as SessionServerAddress
    from harness.rollouts.client.session_server import Deadlines as Deadlines
    from harness.rollouts.control.abort import abort_rollout as abort_rollout
    from harness.rollouts.control.abort_report import AbortBudget as AbortBudget
    from harness.rollouts.control.abort_report import AbortReport as AbortReport
    from harness.rollouts.control.abort_report import AgentHooks as AgentHooks
    from harness.rollouts.control.abort_report import Keep as Keep
    from harness.rollouts.control.pause import PauseReport as PauseReport
    from harness.rollouts.control.pause import paused_rollout as paused_rollout
    from harness.rollouts.control.weights import WeightUpdater as WeightUpdater
    from harness.rollouts.control.weights_report import UpdateBudget as UpdateBudget
    from harness.rollouts.control.weights_report import UpdateReport as UpdateReport
    from harness.rollouts.manager import SessionManager as SessionManager
    from harness.rollouts.sandboxes.spec import SandboxSpec as SandboxSpec
    from harness.samples.codec import read_samples as read_samples
    from harness.samples.codec import write_samples as write_samples
    from harness.samples.delivery import Selection as Selection
    from harness.samples.rollout import Outcome as Outcome
    from harness.samples.rollout import OutcomeKind as OutcomeKind
    from harness.samples.rollout import Rollout as Rollout
    from harness.server.serving import RunningServer as RunningServer
    from harness.server.serving import serve as serve
    from harness.server.settings import ServerSettings as ServerSettings
    from harness.server.store.base import MemoryStore as MemoryStore
    from harness.server.store.sqlite import SQLiteStore as SQLiteStore
    from harness.server.store.sqlite import open_store as open_store
    from harness.suite.run.read_run import read_run as read_run
    from harness.tokens.model_family import open_chat_tokenizer as open_chat_tokenizer
    from harness.tokens.templates.chat_template import ChatTemplateTokenizer as ChatTemplateTokenizer
    from harness.turn_ends import TurnEnd as TurnEnd
    from harness.turn_ends import TurnStatus as TurnStatus
    from harness.types import GenerationRequest as GenerationRequest
    from harness.types import GenerationResult as GenerationResult
    from harness.types import Sample as Sample
    from harness.types import SampleStatus as SampleStatus
    from harness.types import SamplingParams as SamplingParams
    from harness.types import Turn as Turn


_NAMES: Mapping[str, str] = {
    # Rollouts
    "rollouts.manager": "SessionManager",
    "rollouts.agents.task": "AgentTask ProgramAgent FunctionAgent",
    "rollouts.sandboxes.spec": "SandboxSpec",
    "rollouts.agents.programs": "bundled_agent prepare_agent",
    "samples.rollout": "Rollout Outcome OutcomeKind",
    "rollouts.client.session_server": "Deadlines",
    # Control: abort, pause, weight updates
    "rollouts.control.abort": "abort_rollout",
    "rollouts.control.abort_report": "AbortBudget AbortReport AgentHooks Keep",
    "rollouts.control.pause": "paused_rollout PauseReport",
    "rollouts.control.weights": "WeightUpdater",
    "adapters.ray.node": "NodeSetup",
    "adapters.ray.rollouts": "NodeRollout RayRollouts",
    "rollouts.control.weights_report": "UpdateBudget UpdateReport",
    "engines.base": "PauseMode TokenProvider",
    "rollouts.client.connections": "SessionServerAddress",
    # The session server
    "server.serving": "serve RunningServer",
    "server.settings": "ServerSettings",
    "engines.teachers": "TeacherSpec",
    "server.store.base": "MemoryStore",
    "server.store.sqlite": "SQLiteStore open_store",
    # Engines
    "engines.connect": "open_engine",
    "engines.remote.sglang": "SGLangTokenProvider",
    "engines.remote.vllm": "VLLMTokenProvider",
    "engines.huggingface.provider": "HuggingFaceTokenProvider",
    "tokens.templates.chat_template": "ChatTemplateTokenizer",
    "engines.examine.comparison": "check_logprobs_close",
    "engines.pool.pool": "EnginePool",
    "engines.scripted": "ScriptedEngine Script ScriptStep ScriptedFault",
    # Values
    "types": "Sample SampleStatus Turn SamplingParams GenerationRequest GenerationResult",
    "samples.delivery": "Selection",
    "turn_ends": "TurnEnd TurnStatus",
    # Models and files
    "tokens.model_family": "open_chat_tokenizer",
    "lab.models.resolve": "resolve_model",
    "samples.codec": "read_samples write_samples",
    "suite.run.read_run": "read_run",
    # Errors
    "errors": "HarnessError",
}
"""Public names, by the module of `harness` that defines them."""
_HOMES = {name: f"harness.{module}" for module, names in _NAMES.items() for name in names.split()}

__all__ = ["errors", "training"]
__all__ += list(_HOMES)

_load = lazy_loader(globals(), _HOMES)


def _find(name: str) -> object:
    """Load a public name. Raises `AttributeError`, suggesting similar names."""
    if name in ("errors", "training"):
        return import_module(f"harness.{name}")
    if name in _HOMES or name.startswith("__"):
        return _load(name)
    training = import_module("harness.training")
    if name not in training.__all__:  # the error suggests names of both front doors
        return lazy_loader(globals(), {**_HOMES, **dict.fromkeys(training.__all__, "")})(name)
    warnings.warn(f"harness.{name} has moved to harness.training.{name}", DeprecationWarning, stacklevel=2)
    return getattr(training, name)


if not TYPE_CHECKING:  # else a type checker would take every name for one that may exist
    __getattr__ = _find


def __dir__() -> list[str]:
    """List the loaded names and every public name."""
    return sorted({*globals(), *__all__})
