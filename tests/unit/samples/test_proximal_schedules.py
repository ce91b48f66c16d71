"""Whatever happens in whatever order, `proximal` is the definition (I7).

Random schedules of generations, aborts, updates, tool waits, branches and sweeps over a tree of turns. A naive shadow
keeps, token by token, which version sampled it and whether its branch was scored while its next version was live.
"""

import hypothesis.strategies as st
import numpy as np
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec import structs

from harness.samples.delivery import plan_delivery
from harness.samples.merge import build_samples
from harness.samples.proximal import score_turns, scoring_start, waiting_tokens
from harness.samples.versions import policy_version
from harness.turn_ends import TurnStatus
from harness.types import TokenIds, Turn, as_ids
from tests.thoroughness import examples
from tests.unit.samples.toy_policy import ToyEngine, grown, proximal_of, toy_policy, turn


class Schedules(RuleBasedStateMachine):
    """One session of one engine; several turns may be unfinished at the same time."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = ToyEngine()
        self.turns: dict[int, Turn] = {}
        self.sampled_by: dict[tuple[int, int], int] = {}
        """(turn, token) -> behavior version, as the engine was when it sampled."""
        self.met: set[tuple[int, int]] = set()
        """Tokens whose branch was scored under their next version."""

    @initialize(context=st.integers(1, 3))
    def first_turn(self, context: int) -> None:
        self.turns[0] = turn(0, context=range(context))

    @rule(data=st.data(), context=st.integers(1, 3))
    def ask(self, data, context: int) -> None:
        """The agent continues from any turn: a next turn, or a sibling."""
        parent = self.turns[data.draw(st.sampled_from(sorted(self.turns)))]
        index = len(self.turns)
        self.turns[index] = turn(index, context=range(context), parent=parent)

    @precondition(lambda self: self.leaves())
    @rule(data=st.data(), tokens=st.integers(0, 4), asks_for_scores=st.booleans())
    def sample(self, data, tokens: int, asks_for_scores: bool) -> None:
        """One request of a leaf, a continuation if it has tokens already; it ends whenever it ends."""
        leaf = data.draw(st.sampled_from(self.leaves()))
        branch = self.branch(leaf)
        start = scoring_start(branch, self.engine.version) if asks_for_scores else None
        result = self.engine.generate(ids_of(branch), tokens, start)
        if result.prompt_logprobs is not None:
            self.settle(branch, result.prompt_logprobs)
        before = self.turns[leaf].output_ids.size
        self.turns[leaf] = grown(self.turns[leaf], result, result.version_spans)
        self.sampled_by |= {(leaf, before + i): self.engine.version for i in range(tokens)}

    @rule(by=st.sampled_from([1, 1, 1, 2, 3]))
    def update(self, by: int) -> None:
        """New weights, now and then without the versions between."""
        self.engine.update(self.engine.version + by)

    @rule(data=st.data(), budget=st.integers(0, 4))
    def sweep(self, data, budget: int) -> None:
        """Score leaf after leaf until the budget of requests is used up."""
        leaves = data.draw(st.permutations(self.leaves()))
        for leaf in leaves:
            branch = self.branch(leaf)
            start = scoring_start(branch, self.engine.version)
            if start is None or not budget:
                continue
            budget -= 1
            self.settle(branch, self.engine.score(ids_of(branch), start))

    @rule(data=st.data(), back=st.integers(1, 3))
    def score_too_much_and_the_wrong_version(self, data, back: int) -> None:
        """A scoring of the whole branch under any version, a stale one included, does no harm."""
        leaf = data.draw(st.sampled_from(sorted(self.turns)))
        branch = self.branch(leaf)
        other = ToyEngine(version=max(0, self.engine.version - back))
        self.settle(branch, other.score(ids_of(branch), 1))

    @invariant()
    def every_token_has_the_definitions_values(self) -> None:
        for index, each in self.turns.items():
            assert proximal_of([each]) == [self.true_value(each, i) for i in range(each.output_ids.size)], index

    @invariant()
    def what_waits_is_what_could_still_be_settled_now(self) -> None:
        version = self.engine.version
        waiting = [key for key, by in self.sampled_by.items() if by == version - 1 and key not in self.met]
        assert waiting_tokens(self.turns.values(), version) == len(waiting)

    @invariant()
    def samples_carry_the_same_values(self) -> None:
        for sample in build_samples(plan_delivery(list(self.turns.values())), {}):
            is_sampled = sample.behavior_versions >= 0
            pairs = zip(sample.proximal_logprobs[is_sampled], sample.proximal_versions[is_sampled], strict=True)
            branch = [self.turns[index] for index in sample.metadata["turns"]]
            assert [(float(value), int(version)) for value, version in pairs] == proximal_of(branch)

    def settle(self, branch, scoring) -> None:
        """Apply `scoring`, and note in the shadow which tokens that settles."""
        for changed in score_turns(branch, scoring):
            self.turns[changed.index] = changed
        first, last = scoring.start, scoring.start + scoring.logprobs.size
        for each in branch:
            for i in range(each.output_ids.size):
                covered = first <= each.prompt_length + i < last
                if covered and self.sampled_by[each.index, i] == policy_version(scoring.version) - 1:
                    self.met.add((each.index, i))

    def true_value(self, each: Turn, i: int) -> tuple[float, int]:
        behavior = self.sampled_by[each.index, i]
        version = behavior + ((each.index, i) in self.met)
        value = toy_policy(each.output_ids[i : i + 1], each.prompt_length + i, version)[0]
        return float(value), version

    def leaves(self) -> list[int]:
        parents = {each.parent for each in self.turns.values()}
        return [index for index in sorted(self.turns) if index not in parents]

    def branch(self, leaf: int) -> list[Turn]:
        path = [self.turns[leaf]]
        while path[-1].parent is not None:
            path.append(self.turns[path[-1].parent])
        return path[::-1]


def ids_of(branch: list[Turn]) -> TokenIds:
    return as_ids(np.concatenate([part for each in branch for part in (each.context_ids, each.output_ids)]))


def test_the_merge_rule_ends_a_sample_not_its_values():
    """A turn cut short keeps what it was scored with; the turns after it are in no sample."""
    engine = ToyEngine()
    first = grown(turn(0), result := engine.generate(as_ids([7, 8]), 3), result.version_spans)
    cut = structs.replace(first, status=TurnStatus.ABORTED)
    after = turn(1, parent=cut, output=[1], logprobs=[-1.0], spans=[("0", 0, 1)])
    engine.update(1)
    scored = score_turns([cut, after], engine.score(ids_of([cut, after]), 1))

    [sample] = build_samples(plan_delivery(scored), {})

    assert sample.proximal_versions.tolist() == [1, 1, 1]
    assert sample.metadata["dropped_trailing_turns"] == 1


TestSchedules = Schedules.TestCase
TestSchedules.settings = settings(max_examples=examples(75), stateful_step_count=30, deadline=None)
