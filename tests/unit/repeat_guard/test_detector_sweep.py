"""The pure detector and the batched one against the naive definition, on misleading sequences.

There are 22,000 of them, a fifth in `make check`, and a hundred thousand in `make soak`.
Every worker collects this file, and one runs it: that one imports torch.
"""

import os
from collections import Counter
from random import Random

import pytest

from server_patch.repeat_terminate import RepeatDetector, RepeatTerminateConfig, Rule
from tests.thoroughness import examples
from tests.unit.repeat_guard.sequences import Case, Trigger, case, naive_trigger

pytestmark = pytest.mark.xdist_group("torch")  # and the sequences and their definition are made once

SEQUENCES_PER_CASE = 245  # a multiple of the seven kinds
LENGTH = 48
SEQUENCES = int(os.environ.get("HARNESS_SOAK_EXAMPLES", examples(22_000)))
CASES = 1 + SEQUENCES // SEQUENCES_PER_CASE


@pytest.fixture(scope="module", name="cases")
def _cases() -> list[Case]:
    random = Random(20261127)
    return [case(random, sequences=SEQUENCES_PER_CASE, length=LENGTH) for _ in range(CASES)]


@pytest.fixture(scope="module", name="definition")
def _definition(cases: list[Case]) -> list[list[Trigger | None]]:
    """Per case and sequence, what must come out."""
    return [[naive_trigger(case.config, case.key_ids, tokens) for tokens in case.sequences] for case in cases]


def test_the_sweep_is_as_large_as_promised_and_probes_every_rule(definition: list[list[Trigger | None]]) -> None:
    """A sweep in which nothing triggers, or everything at once, would prove nothing."""
    rules = Counter(trigger and trigger.rule for row in definition for trigger in row)
    places = {trigger.index for row in definition for trigger in row if trigger}

    assert rules.total() >= SEQUENCES
    assert min(rules[key] for key in (None, *Rule)) > SEQUENCES / 10, rules
    assert places == set(range(LENGTH))


def test_the_detector_decides_as_defined(cases: list[Case], definition: list[list[Trigger | None]]) -> None:
    compared = 0
    for case_, expected in zip(cases, definition, strict=True):
        for tokens, trigger in zip(case_.sequences, expected, strict=True):
            assert trigger == _pure(case_, tokens), (case_.config, case_.key_ids, tokens)
            compared += 1

    assert compared >= SEQUENCES


def test_the_detector_decides_alike_across_a_joint(cases: list[Case], definition: list[list[Trigger | None]]) -> None:
    """Where a trigger lies behind the joint, seeding the head and pushing the rest finds the same one."""
    random, compared = Random(1), 0
    for case_, expected in zip(cases, definition, strict=True):
        for tokens, trigger in zip(case_.sequences, expected, strict=True):
            joint = random.randint(0, LENGTH if trigger is None else trigger.index)
            detector = RepeatDetector(case_.config, case_.key_ids)
            detector.seed(tokens[:joint])
            index = detector.push_all(tokens[joint:])
            found = None if index is None else (joint + index, detector.rule)
            assert trigger == found, (case_.config, case_.key_ids, tokens, joint)
            compared += 1

    assert compared >= SEQUENCES


def test_the_batched_detector_decides_as_defined(cases: list[Case], definition: list[list[Trigger | None]]) -> None:
    compared = 0
    for case_, expected in zip(cases, definition, strict=True):
        for tokens, trigger, found in zip(case_.sequences, expected, _batched(case_), strict=True):
            assert trigger == found, (case_.config, case_.key_ids, tokens)
            compared += 1

    assert compared >= SEQUENCES


def test_a_retired_row_triggers_no_more_and_a_triggered_one_keeps_its_rule() -> None:
    import torch

    from server_patch.repeat_terminate.huggingface import BatchedRepeatDetector

    detector = BatchedRepeatDetector(RepeatTerminateConfig(True, 0, 2, 0), 2)
    detector.push(torch.tensor([1, 5]))
    detector.push(torch.tensor([1, 6]))
    detector.retire(torch.tensor([True, True]))

    assert detector.push(torch.tensor([1, 6])).tolist() == [True, False]


def _pure(case_: Case, tokens: list[int]) -> Trigger | None:
    detector = RepeatDetector(case_.config, case_.key_ids)
    index = detector.push_all(tokens)
    return None if index is None or detector.rule is None else Trigger(index, detector.rule)


def _batched(case_: Case) -> list[Trigger | None]:
    """Where each row triggers first: its code after every step."""
    import torch

    from server_patch.repeat_terminate.huggingface import RULE_CODES, BatchedRepeatDetector

    detector = BatchedRepeatDetector(case_.config, len(case_.sequences), case_.key_ids)
    tokens = torch.tensor(case_.sequences)
    history = []
    for step in range(LENGTH):
        detector.push(tokens[:, step])
        history.append(detector.codes.clone())
    codes = torch.stack(history, dim=1)
    first = (codes > 0).int().argmax(dim=1).tolist()
    return [
        Trigger(index, RULE_CODES[code]) if code else None
        for index, code in zip(first, codes[:, -1].tolist(), strict=True)
    ]
