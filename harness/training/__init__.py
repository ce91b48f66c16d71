"""Training on sessions: segments, packs, optimizer steps of exact size, rewards, learners.

Programs import the names in `__all__` from here; the modules may move. Uses `rollouts`, `samples` and what these use.
Start with `collector/`, which fills steps, then `learner/`, which trains them.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from harness._front_door import lazy_loader

if TYPE_CHECKING:
    from harness.samples.credit import return_to_go_advantages as return_to_go_advantages
    from harness.samples.credit import rollout_advantages as rollout_advantages
    from harness.samples.credit import turn_advantages as turn_advantages
    from harness.samples.credit import value_advantages as value_advantages
    from harness.samples.delivery import deliver as deliver
    from harness.samples.encoders import EncodedSample as EncodedSample
    from harness.samples.encoders import SegmentEncoder as SegmentEncoder
    from harness.samples.encoders import WholeSampleEncoder as WholeSampleEncoder
    from harness.samples.encoders import require_sampled_prefix as require_sampled_prefix
    from harness.samples.packing import plan_packs as plan_packs
    from harness.samples.packs import Pack as Pack
    from harness.samples.packs import PackStream as PackStream
    from harness.samples.segments import LostTokens as LostTokens
    from harness.samples.segments import Segment as Segment
    from harness.samples.segments import TooLong as TooLong
    from harness.samples.segments import fit_segment as fit_segment
    from harness.samples.turn_rewards import RolloutReward as RolloutReward
    from harness.samples.turn_rewards import TurnValue as TurnValue
    from harness.samples.turn_rewards import reward_turns as reward_turns
    from harness.samples.turn_rewards import value_turns as value_turns
    from harness.training.collector.collector import Collector as Collector
    from harness.training.collector.groups import GroupIndex as GroupIndex
    from harness.training.collector.groups import RolloutIndex as RolloutIndex
    from harness.training.collector.groups import ScoredRollout as ScoredRollout
    from harness.training.collector.groups import drop_zero_variance as drop_zero_variance
    from harness.training.collector.groups import standardize as standardize
    from harness.training.collector.groups import take_rewards as take_rewards
    from harness.training.collector.pipeline import Normalizer as Normalizer
    from harness.training.collector.pipeline import StepPipeline as StepPipeline
    from harness.training.collector.record.step_record import StepRecord as StepRecord
    from harness.training.collector.record.step_record import pack_again as pack_again
    from harness.training.collector.record.step_table import StepTable as StepTable
    from harness.training.collector.record.step_table import read_step as read_step
    from harness.training.collector.rollout_source import RolloutSource as RolloutSource
    from harness.training.collector.rollout_source import SessionSource as SessionSource
    from harness.training.collector.sampling_scale import OffScale as OffScale
    from harness.training.collector.segment_maker import SegmentMaker as SegmentMaker
    from harness.training.collector.segment_maker import Stale as Stale
    from harness.training.collector.step_outcome import CollectedGroup as CollectedGroup
    from harness.training.collector.step_outcome import TrainedStep as TrainedStep
    from harness.training.collector.step_rules import OnFailure as OnFailure
    from harness.training.collector.step_rules import Order as Order
    from harness.training.collector.step_rules import Partial as Partial
    from harness.training.collector.step_rules import StepBudget as StepBudget
    from harness.training.collector.step_rules import StepRules as StepRules
    from harness.training.learner.learner import Learner as Learner
    from harness.training.learner.learner import LossKind as LossKind
    from harness.training.learner.learner import LossSettings as LossSettings
    from harness.training.learner.learner import LossSums as LossSums
    from harness.training.learner.learner import OptimizerSettings as OptimizerSettings
    from harness.training.learner.learner import ScriptedLearner as ScriptedLearner
    from harness.training.learner.learner import StepReport as StepReport
    from harness.training.learner.torch_learner import TorchLearner as TorchLearner
    from harness.training.step_stores import StepStore as StepStore
    from harness.training.step_stores import report_steps as report_steps


_NAMES: Mapping[str, str] = {
    "samples.segments": "Segment TooLong fit_segment LostTokens",
    "samples.encoders": "SegmentEncoder EncodedSample WholeSampleEncoder require_sampled_prefix",
    "samples.packing": "plan_packs",
    "samples.packs": "Pack PackStream",
    "training.collector.pipeline": "StepPipeline Normalizer",
    "training.collector.step_rules": "StepRules StepBudget Order OnFailure Partial",
    "training.collector.groups": "RolloutIndex GroupIndex ScoredRollout drop_zero_variance standardize take_rewards",
    "training.collector.segment_maker": "SegmentMaker Stale",
    "training.collector.step_outcome": "TrainedStep CollectedGroup",
    "training.collector.collector": "Collector",
    "training.collector.rollout_source": "RolloutSource SessionSource",
    "training.collector.sampling_scale": "OffScale",
    "samples.delivery": "deliver",
    "samples.credit": "rollout_advantages turn_advantages return_to_go_advantages value_advantages",
    "samples.turn_rewards": "RolloutReward reward_turns TurnValue value_turns",
    "training.collector.record.step_table": "StepTable read_step",
    "training.collector.record.step_record": "StepRecord pack_again",
    "training.learner.learner": "Learner LossSums StepReport ScriptedLearner LossKind LossSettings OptimizerSettings",
    "training.learner.torch_learner": "TorchLearner",
    "training.step_stores": "report_steps StepStore",
}
"""Public names, by the module of `harness` that defines them."""
_HOMES = {name: f"harness.{module}" for module, names in _NAMES.items() for name in names.split()}

__all__ = list(_HOMES)

if not TYPE_CHECKING:  # else a type checker would take every name for one that may exist
    __getattr__ = lazy_loader(globals(), _HOMES)


def __dir__() -> list[str]:
    """List the loaded names and every public name."""
    return sorted({*globals(), *__all__})
