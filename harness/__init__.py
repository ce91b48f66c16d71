"""The multi-turn agent session harness: agents as processes in, token-exact training samples out.

The names in `__all__` are the whole public interface: import them from here. The modules below may move. A name is
loaded on first use, so `import harness` takes milliseconds and imports neither torch nor an HTTP stack.
"""

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING

from harness._version import __version__ as __version__

if TYPE_CHECKING:
    from harness import errors as errors
    from harness.adapters.ray.node import NodeSetup as NodeSetup
    from harness.adapters.ray.rollouts import NodeRollout as NodeRollout
    from harness.adapters.ray.rollouts import RayRollouts as RayRollouts
    from harness.client.connections import SessionServerAddress as SessionServerAddress
    from harness.client.session_server import Deadlines as Deadlines
    from harness.collector.collector import Collector as Collector
    from harness.collector.groups import GroupIndex as GroupIndex
    from harness.collector.groups import RolloutIndex as RolloutIndex
    from harness.collector.groups import ScoredRollout as ScoredRollout
    from harness.collector.groups import drop_zero_variance as drop_zero_variance
    from harness.collector.groups import standardize as standardize
    from harness.collector.groups import take_rewards as take_rewards
    from harness.collector.pipeline import Normalizer as Normalizer
    from harness.collector.pipeline import StepPipeline as StepPipeline
    from harness.collector.record.step_record import StepRecord as StepRecord
    from harness.collector.record.step_record import pack_again as pack_again
    from harness.collector.record.step_table import StepTable as StepTable
    from harness.collector.record.step_table import read_step as read_step
    from harness.collector.rollout_source import RolloutSource as RolloutSource
    from harness.collector.sampling_scale import OffScale as OffScale
    from harness.collector.segment_maker import SegmentMaker as SegmentMaker
    from harness.collector.segment_maker import Stale as Stale
    from harness.collector.session_source import SessionSource as SessionSource
    from harness.collector.step_outcome import CollectedGroup as CollectedGroup
    from harness.collector.step_outcome import TrainedStep as TrainedStep
    from harness.collector.step_rules import OnFailure as OnFailure
    from harness.collector.step_rules import Order as Order
    from harness.collector.step_rules import Partial as Partial
    from harness.collector.step_rules import StepBudget as StepBudget
    from harness.collector.step_rules import StepRules as StepRules
    from harness.control.abort import abort_rollout as abort_rollout
    from harness.control.abort_report import AbortBudget as AbortBudget
    from harness.control.abort_report import AbortReport as AbortReport
    from harness.control.abort_report import AgentHooks as AgentHooks
    from harness.control.abort_report import Keep as Keep
    from harness.control.pause import PauseReport as PauseReport
    from harness.control.pause import paused_rollout as paused_rollout
    from harness.control.weights import WeightUpdater as WeightUpdater
    from harness.control.weights_report import UpdateBudget as UpdateBudget
    from harness.control.weights_report import UpdateReport as UpdateReport
    from harness.engines.base import PauseMode as PauseMode
    from harness.engines.base import TokenProvider as TokenProvider
    from harness.engines.connect import open_engine as open_engine
    from harness.engines.examine.closeness import check_logprobs_close as check_logprobs_close
    from harness.engines.huggingface.provider import HuggingFaceTokenProvider as HuggingFaceTokenProvider
    from harness.engines.pool.pool import EnginePool as EnginePool
    from harness.engines.remote.sglang import SGLangTokenProvider as SGLangTokenProvider
    from harness.engines.remote.vllm import VLLMTokenProvider as VLLMTokenProvider
    from harness.engines.scripted import Script as Script
    from harness.engines.scripted import ScriptedEngine as ScriptedEngine
    from harness.engines.scripted import ScriptedFault as ScriptedFault
    from harness.engines.scripted import ScriptStep as ScriptStep
    from harness.errors import HarnessError as HarnessError
    from harness.learner.learner import Learner as Learner
    from harness.learner.learner import LossSums as LossSums
    from harness.learner.learner import StepReport as StepReport
    from harness.learner.scripted import ScriptedLearner as ScriptedLearner
    from harness.learner.settings import LossKind as LossKind
    from harness.learner.settings import LossSettings as LossSettings
    from harness.learner.settings import OptimizerSettings as OptimizerSettings
    from harness.learner.torch_learner import TorchLearner as TorchLearner
    from harness.models.resolve import resolve_model as resolve_model
    from harness.rollouts.agents.programs import bundled_agent as bundled_agent
    from harness.rollouts.agents.programs import prepare_agent as prepare_agent
    from harness.rollouts.agents.task import AgentTask as AgentTask
    from harness.rollouts.agents.task import FunctionAgent as FunctionAgent
    from harness.rollouts.agents.task import ProgramAgent as ProgramAgent
    from harness.rollouts.manager import SessionManager as SessionManager
    from harness.samples.codec import read_samples as read_samples
    from harness.samples.codec import write_samples as write_samples
    from harness.samples.credit import return_to_go_advantages as return_to_go_advantages
    from harness.samples.credit import rollout_advantages as rollout_advantages
    from harness.samples.credit import turn_advantages as turn_advantages
    from harness.samples.delivery import Selection as Selection
    from harness.samples.delivery import deliver as deliver
    from harness.samples.encoders import EncodedSample as EncodedSample
    from harness.samples.encoders import SegmentEncoder as SegmentEncoder
    from harness.samples.encoders import WholeSampleEncoder as WholeSampleEncoder
    from harness.samples.encoders import require_sampled_prefix as require_sampled_prefix
    from harness.samples.pack_stream import PackStream as PackStream
    from harness.samples.packing import plan_packs as plan_packs
    from harness.samples.packs import Pack as Pack
    from harness.samples.rollout import Outcome as Outcome
    from harness.samples.rollout import OutcomeKind as OutcomeKind
    from harness.samples.rollout import Rollout as Rollout
    from harness.samples.segments import LostTokens as LostTokens
    from harness.samples.segments import Segment as Segment
    from harness.samples.segments import TooLong as TooLong
    from harness.samples.segments import fit_segment as fit_segment
    from harness.samples.turn_rewards import RolloutReward as RolloutReward
    from harness.samples.turn_rewards import reward_turns as reward_turns
    from harness.server.serving import RunningServer as RunningServer
    from harness.server.serving import serve as serve
    from harness.server.settings import ServerSettings as ServerSettings
    from harness.store.connect import open_store as open_store
    from harness.store.memory import MemoryStore as MemoryStore
    from harness.store.sqlite import SQLiteStore as SQLiteStore
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


_HOMES: Mapping[str, str] = {
    # Rollouts
    "SessionManager": "harness.rollouts.manager",
    "AgentTask": "harness.rollouts.agents.task",
    "ProgramAgent": "harness.rollouts.agents.task",
    "FunctionAgent": "harness.rollouts.agents.task",
    "bundled_agent": "harness.rollouts.agents.programs",
    "prepare_agent": "harness.rollouts.agents.programs",
    "Rollout": "harness.samples.rollout",
    "Outcome": "harness.samples.rollout",
    "OutcomeKind": "harness.samples.rollout",
    "Deadlines": "harness.client.session_server",
    # Control: abort, pause, weight updates
    "abort_rollout": "harness.control.abort",
    "AbortBudget": "harness.control.abort_report",
    "AbortReport": "harness.control.abort_report",
    "AgentHooks": "harness.control.abort_report",
    "Keep": "harness.control.abort_report",
    "paused_rollout": "harness.control.pause",
    "PauseReport": "harness.control.pause",
    "WeightUpdater": "harness.control.weights",
    "NodeSetup": "harness.adapters.ray.node",
    "NodeRollout": "harness.adapters.ray.rollouts",
    "RayRollouts": "harness.adapters.ray.rollouts",
    "UpdateBudget": "harness.control.weights_report",
    "UpdateReport": "harness.control.weights_report",
    "PauseMode": "harness.engines.base",
    "SessionServerAddress": "harness.client.connections",
    # The session server
    "serve": "harness.server.serving",
    "RunningServer": "harness.server.serving",
    "ServerSettings": "harness.server.settings",
    "open_store": "harness.store.connect",
    "MemoryStore": "harness.store.memory",
    "SQLiteStore": "harness.store.sqlite",
    # Engines
    "open_engine": "harness.engines.connect",
    "TokenProvider": "harness.engines.base",
    "SGLangTokenProvider": "harness.engines.remote.sglang",
    "VLLMTokenProvider": "harness.engines.remote.vllm",
    "HuggingFaceTokenProvider": "harness.engines.huggingface.provider",
    "ChatTemplateTokenizer": "harness.tokens.templates.chat_template",
    "check_logprobs_close": "harness.engines.examine.closeness",
    "EnginePool": "harness.engines.pool.pool",
    "ScriptedEngine": "harness.engines.scripted",
    "Script": "harness.engines.scripted",
    "ScriptStep": "harness.engines.scripted",
    "ScriptedFault": "harness.engines.scripted",
    # Values
    "Sample": "harness.types",
    "SampleStatus": "harness.types",
    "Selection": "harness.samples.delivery",
    "Turn": "harness.types",
    "TurnEnd": "harness.turn_ends",
    "TurnStatus": "harness.turn_ends",
    "SamplingParams": "harness.types",
    "GenerationRequest": "harness.types",
    "GenerationResult": "harness.types",
    # Training
    "Segment": "harness.samples.segments",
    "TooLong": "harness.samples.segments",
    "fit_segment": "harness.samples.segments",
    "LostTokens": "harness.samples.segments",
    "SegmentEncoder": "harness.samples.encoders",
    "EncodedSample": "harness.samples.encoders",
    "WholeSampleEncoder": "harness.samples.encoders",
    "require_sampled_prefix": "harness.samples.encoders",
    "plan_packs": "harness.samples.packing",
    "PackStream": "harness.samples.pack_stream",
    "Pack": "harness.samples.packs",
    "StepPipeline": "harness.collector.pipeline",
    "StepRules": "harness.collector.step_rules",
    "StepBudget": "harness.collector.step_rules",
    "SessionSource": "harness.collector.session_source",
    "RolloutIndex": "harness.collector.groups",
    "SegmentMaker": "harness.collector.segment_maker",
    "Stale": "harness.collector.segment_maker",
    "TrainedStep": "harness.collector.step_outcome",
    "Collector": "harness.collector.collector",
    "RolloutSource": "harness.collector.rollout_source",
    "GroupIndex": "harness.collector.groups",
    "ScoredRollout": "harness.collector.groups",
    "CollectedGroup": "harness.collector.step_outcome",
    "Order": "harness.collector.step_rules",
    "OnFailure": "harness.collector.step_rules",
    "Partial": "harness.collector.step_rules",
    "OffScale": "harness.collector.sampling_scale",
    "Normalizer": "harness.collector.pipeline",
    "drop_zero_variance": "harness.collector.groups",
    "standardize": "harness.collector.groups",
    "take_rewards": "harness.collector.groups",
    "deliver": "harness.samples.delivery",
    "rollout_advantages": "harness.samples.credit",
    "turn_advantages": "harness.samples.credit",
    "return_to_go_advantages": "harness.samples.credit",
    "RolloutReward": "harness.samples.turn_rewards",
    "reward_turns": "harness.samples.turn_rewards",
    "StepTable": "harness.collector.record.step_table",
    "StepRecord": "harness.collector.record.step_record",
    "read_step": "harness.collector.record.step_table",
    "pack_again": "harness.collector.record.step_record",
    "Learner": "harness.learner.learner",
    "LossSums": "harness.learner.learner",
    "StepReport": "harness.learner.learner",
    "ScriptedLearner": "harness.learner.scripted",
    "TorchLearner": "harness.learner.torch_learner",
    "LossKind": "harness.learner.settings",
    "LossSettings": "harness.learner.settings",
    "OptimizerSettings": "harness.learner.settings",
    # Models and files
    "open_chat_tokenizer": "harness.tokens.model_family",
    "resolve_model": "harness.models.resolve",
    "read_samples": "harness.samples.codec",
    "write_samples": "harness.samples.codec",
    "read_run": "harness.suite.run.read_run",
    # Errors
    "HarnessError": "harness.errors",
}
"""Public names, and the modules that define them."""

__all__ = ["errors"]
__all__ += list(_HOMES)


def _load(name: str) -> object:
    """Load a public name. Raises `AttributeError`, suggesting similar names."""
    if name == "errors":
        return import_module("harness.errors")
    if name not in _HOMES:
        from difflib import get_close_matches  # only a mistake pays for it

        near = [] if name.startswith("__") else get_close_matches(name, __all__, n=3)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise AttributeError(f"module 'harness' has no attribute {name!r}{hint}", name=name)
    found: object = getattr(import_module(_HOMES[name]), name)
    globals()[name] = found  # the next use finds it without asking here
    return found


if not TYPE_CHECKING:  # else a type checker would take every name for one that may exist
    __getattr__ = _load


def __dir__() -> list[str]:
    """List the loaded names and every public name."""
    return sorted({*globals(), *__all__})
