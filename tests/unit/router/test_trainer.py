"""What a trainer that speaks only SGLang's verbs wants of the sessions, as a table and a few states."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import MalformedRequest
from harness.gateway.router.trainer import Begun, Intent, Trainer, intent_of
from server_patch.router.verbs import VerbOrder

UNTIL = 10.0


def order(verb: str, **fields: object) -> VerbOrder:
    """A verb with a body."""
    return VerbOrder(verb, "POST", "", json.dumps(fields).encode())


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        (order("/pause_generation"), Intent.PAUSE),
        (order("/pause_generation", mode="in_place"), Intent.PAUSE),
        (order("/continue_generation"), Intent.CONTINUE),
        (order("/abort_request", abort_all=True), Intent.ABORT_ALL),
        (order("/abort_request", rid="a"), None),
        (order("/abort_request"), None),
        (order("/flush_cache"), None),
        (order("/update_weight_version", new_version="3"), Intent.NEW_WEIGHTS),
        (order("/update_weights_from_disk", model_path="/w", weight_version="3"), Intent.NEW_WEIGHTS),
        (order("/update_weights_from_disk", model_path="/w"), Intent.PART_OF_WEIGHTS),
        (order("/update_weights_from_distributed", names=[]), Intent.PART_OF_WEIGHTS),
        (order("/update_weights_from_distributed", weight_version="3"), Intent.NEW_WEIGHTS),
        (order("/update_weights_from_tensor", weight_version=None), Intent.PART_OF_WEIGHTS),
        (VerbOrder("/pause_generation", "POST", "", b"[1]"), None),
        (VerbOrder("/abort_request", "POST", "", b"{"), None),
        (VerbOrder("/abort_request", "POST", "", b"[" * 100_000), None),
    ],
)
def test_a_verb_says_what_it_is_about(said: VerbOrder, meant: Intent | None):
    """Weights without a label may be followed by more of them, and what workers will refuse concerns nobody."""
    assert intent_of(said) is meant


@pytest.mark.parametrize("said", ["false", "true", 1, 0, None, []])
def test_an_abort_of_everything_is_asked_for_by_true_alone(said: object):
    """Engines disagree about the rest, and to end everything by a guess cannot be undone."""
    with pytest.raises(MalformedRequest, match="abort_all: expected true or false"):
        intent_of(order("/abort_request", abort_all=said))


def after(*intents: Intent, obeyed: int = 1) -> Trainer:
    """What holds when these have been carried out."""
    trainer = Trainer()
    for intent in intents:
        trainer = trainer.advance(intent, obeyed=obeyed, until=UNTIL)
    return trainer


OPEN = Trainer()
PAUSED = Trainer(Begun.PAUSE)
PARTLY_UPDATED = Trainer(Begun.WEIGHTS, UNTIL)
CUT = Trainer(Begun.ABORT, UNTIL)


@pytest.mark.parametrize(
    ("intents", "holds"),
    [
        ((), OPEN),
        ((Intent.PAUSE,), PAUSED),
        ((Intent.PAUSE, Intent.PAUSE), PAUSED),
        ((Intent.PAUSE, Intent.CONTINUE), OPEN),
        ((Intent.CONTINUE,), OPEN),
        ((Intent.NEW_WEIGHTS,), OPEN),
        ((Intent.PART_OF_WEIGHTS,), PARTLY_UPDATED),
        ((Intent.PART_OF_WEIGHTS, Intent.PART_OF_WEIGHTS, Intent.NEW_WEIGHTS), OPEN),
        ((Intent.PART_OF_WEIGHTS, Intent.ABORT_ALL), PARTLY_UPDATED),
        ((Intent.PAUSE, Intent.PART_OF_WEIGHTS, Intent.NEW_WEIGHTS), PAUSED),
        ((Intent.PAUSE, Intent.ABORT_ALL, Intent.NEW_WEIGHTS), PAUSED),
        ((Intent.ABORT_ALL,), CUT),
        ((Intent.ABORT_ALL, Intent.ABORT_ALL), CUT),
        ((Intent.ABORT_ALL, Intent.PAUSE), PAUSED),
        ((Intent.ABORT_ALL, Intent.PART_OF_WEIGHTS), PARTLY_UPDATED),
        ((Intent.ABORT_ALL, Intent.NEW_WEIGHTS), OPEN),
        ((Intent.ABORT_ALL, Intent.CONTINUE), OPEN),
    ],
)
def test_the_gate_after_verbs(intents: tuple[Intent, ...], holds: Trainer):
    assert after(*intents) == holds


@pytest.mark.parametrize("intent", [each for each in Intent if each is not Intent.CONTINUE])
def test_a_verb_that_no_worker_obeyed_changes_nothing(intent: Intent):
    """Except that an abort before it was none of a rollout's end: an update was tried."""
    assert Trainer().advance(intent, obeyed=0, until=UNTIL) == OPEN
    assert PAUSED.advance(intent, obeyed=0, until=UNTIL) == PAUSED
    assert CUT.advance(intent, obeyed=0, until=UNTIL).begun is (
        Begun.ABORT if intent is Intent.ABORT_ALL else Begun.WEIGHTS
    )


@pytest.mark.parametrize("obeyed", [0, 1])
def test_an_abort_that_is_said_again_puts_off_no_end(obeyed: int):
    """Trainers say it until nothing runs any more, and what waits at the gate runs until its session ends."""
    assert CUT.advance(Intent.ABORT_ALL, obeyed=obeyed, until=UNTIL + 1) == CUT
    assert PARTLY_UPDATED.advance(Intent.ABORT_ALL, obeyed=obeyed, until=UNTIL + 1).due == UNTIL + 1


def test_weights_are_swept_for_before_they_go_and_once():
    """A pause is the last moment; without one the first part of the new weights is."""
    assert [OPEN.sweeps_for(intent) for intent in Intent] == [True, False, True, True, False]
    assert CUT.sweeps_for(Intent.PAUSE)
    assert not any(trainer.sweeps_for(intent) for trainer in (PAUSED, PARTLY_UPDATED) for intent in Intent)


@given(st.lists(st.tuples(st.sampled_from(Intent), st.integers(0, 2)), max_size=12))
def test_whatever_comes_the_gate_can_be_opened(said: list[tuple[Intent, int]]):
    """It is shut for a pause, or for a time; never for anything else, and `/continue_generation` ends both."""
    trainer = Trainer()
    for intent, obeyed in said:
        trainer = trainer.advance(intent, obeyed=obeyed, until=UNTIL)
        assert (trainer.due is not None) is (trainer.begun in (Begun.WEIGHTS, Begun.ABORT))
        if trainer.begun is not None:  # what the hold keeps is enough to continue
            assert Trainer.of(trainer.begun, until=UNTIL) == trainer
        assert trainer.advance(Intent.CONTINUE, obeyed=0, until=UNTIL) == OPEN


def test_a_hold_that_does_not_say_what_it_is_for_is_that_of_a_pause():
    """As an earlier router wrote it: nothing but the trainer ends it."""
    assert Trainer.of("", until=UNTIL) == PAUSED
