"""The decisions of the local engine: who runs, what is computed next, whose KV is kept."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from harness.engines.huggingface.scheduler import BatchLimits, KvCopy, KvDrop, KvOp, Scheduler, Sequence, StepPiece


def tokens(*parts: range, room: int = 64, session_id: str | None = None, logits_from: int | None = None) -> Sequence:
    """A sequence that knows the ids of `parts`, with room for more."""
    known = np.concatenate([np.arange(part.start, part.stop, dtype=np.int32) for part in parts])
    buffer = np.concatenate([known, np.zeros(room, dtype=np.int32)])
    wanted = known.size - 1 if logits_from is None else logits_from
    return Sequence(buffer, known.size, wanted, session_id)


def scheduler(sequences: int = 4, step_tokens: int = 64, kv_tokens: int = 4096) -> Scheduler:
    return Scheduler(BatchLimits(sequences, step_tokens, kv_tokens))


def step(schedule: Scheduler) -> list[StepPiece]:
    """One step, in which every sequence that is fully computed samples token 7."""
    pieces = schedule.plan()
    schedule.complete(pieces)
    for piece in pieces:
        if piece.sequence.missing == 0:
            piece.sequence.append(7)
    return pieces


def spans(pieces: list[StepPiece]) -> list[tuple[int, int]]:
    return [(piece.start, piece.stop) for piece in pieces]


def test_a_prompt_is_computed_in_chunks_of_bounded_size() -> None:
    """A long prompt cannot keep the others waiting for longer than one step."""
    schedule = scheduler(step_tokens=64)
    schedule.add(tokens(range(150)))

    assert [spans(step(schedule)) for _ in range(4)] == [[(0, 64)], [(64, 128)], [(128, 150)], [(150, 151)]]


def test_decoding_goes_on_while_a_prompt_is_computed() -> None:
    """Every decoding sequence gets its token first, prompts share the rest."""
    schedule = scheduler(step_tokens=64)
    schedule.add(tokens(range(10)))
    step(schedule)
    schedule.add(tokens(range(100, 300)))

    assert spans(step(schedule)) == [(10, 11), (0, 63)]


def test_no_more_sequences_run_than_allowed() -> None:
    schedule = scheduler(sequences=2)
    arrivals = [tokens(range(first, first + 10)) for first in (0, 100, 200)]
    for sequence in arrivals:
        schedule.add(sequence)
    step(schedule)

    assert (schedule.running, list(schedule.waiting)) == (arrivals[:2], arrivals[2:])


def test_a_session_takes_over_the_kv_of_its_last_turn() -> None:
    """Nothing is copied when a session continues where it ended."""
    schedule = scheduler()
    first = tokens(range(40), session_id="a")
    schedule.add(first)
    step(schedule)
    schedule.finish(first)
    second = tokens(range(60), session_id="a")
    schedule.add(second)

    assert spans(schedule.plan()) == [(40, 60)]
    assert schedule.take_kv_ops() == []
    assert second.cached_tokens == 40


def test_another_session_copies_the_shared_prefix() -> None:
    schedule = scheduler()
    first = tokens(range(40), session_id="a")
    schedule.add(first)
    step(schedule)
    kept = first.kv
    schedule.finish(first)
    second = tokens(range(30), range(100, 120), session_id="b")
    schedule.add(second)

    assert spans(schedule.plan()) == [(30, 50)]
    assert schedule.take_kv_ops() == [KvCopy(kept or 0, second.kv or 0, 30, second.capacity)]


def test_samples_of_one_prompt_compute_it_once() -> None:
    """The second waits until the first has the prompt, then copies all but the token whose logits it needs."""
    schedule = scheduler(step_tokens=64)
    samples = [tokens(range(100)) for _ in range(3)]
    for sequence in samples:
        schedule.add(sequence)

    assert [spans(step(schedule)) for _ in range(3)] == [[(0, 64)], [(64, 100)], [(100, 101), (99, 100), (99, 100)]]


def test_positions_whose_logits_are_wanted_are_always_computed() -> None:
    """A request that scores its prompt from 10 on may not take more than 9 tokens from the cache."""
    schedule = scheduler()
    first = tokens(range(40))
    schedule.add(first)
    step(schedule)
    schedule.finish(first)
    schedule.add(tokens(range(40), logits_from=9))
    pieces = schedule.plan()

    assert spans(pieces) == [(9, 40)]
    assert pieces[0].wanted == range(9, 40)


def test_the_least_recently_used_prefix_goes_first() -> None:
    """Room for a new sequence is made by dropping what was not used for longest."""
    schedule = scheduler(kv_tokens=256)
    kept = []
    for first in (0, 1000):
        sequence = tokens(range(first, first + 60))
        schedule.add(sequence)
        step(schedule)
        kept.append(sequence.kv)
        schedule.finish(sequence)
    schedule.take_kv_ops()
    schedule.add(tokens(range(2000, 2150)))
    schedule.plan()

    assert schedule.take_kv_ops() == [KvDrop(kept[0] or 0)]


def test_a_short_sequence_does_not_take_the_room_of_a_long_prefix() -> None:
    """A prefix that fills the memory goes when a sequence shares its beginning, and the next one can run beside it."""
    schedule = scheduler(kv_tokens=640, step_tokens=640)
    filling = tokens(range(620))
    schedule.add(filling)
    step(schedule)
    schedule.finish(filling)
    short = [tokens(range(20), range(first, first + 5)) for first in (1000, 2000)]
    for sequence in short:
        schedule.add(sequence)
    step(schedule)

    assert schedule.running == short
    assert schedule.used_tokens == 128


def test_the_youngest_goes_back_to_waiting_when_memory_runs_out() -> None:
    """The oldest always advances; the youngest is computed again later, with what it has sampled."""
    schedule = scheduler(kv_tokens=192, sequences=2)
    old, young = tokens(range(60), room=100), tokens(range(1000, 1060))
    schedule.add(old)
    schedule.add(young)
    step(schedule)
    while young in schedule.running:
        step(schedule)

    assert schedule.running == [old]
    assert (young.computed, young.length > 60) == (0, True)


def test_new_weights_invalidate_all_kv() -> None:
    """Kept prefixes are dropped; a running sequence computes everything it knows again."""
    schedule = scheduler()
    finished, running = tokens(range(40)), tokens(range(1000, 1020))
    schedule.add(finished)
    schedule.add(running)
    step(schedule)
    kept = finished.kv
    schedule.finish(finished)
    schedule.forget_kv()

    assert schedule.take_kv_ops() == [KvDrop(kept or 0)]
    assert spans(schedule.plan()) == [(0, 21)]


def test_a_waiting_sequence_can_be_taken_out() -> None:
    schedule = scheduler()
    sequence = tokens(range(10))
    schedule.add(sequence)
    schedule.finish(sequence)

    assert not schedule.has_work
    assert schedule.used_tokens == 0


class _Memory:
    """Executes KV operations on names alone: fails on one that does not exist."""

    def __init__(self) -> None:
        self.held: dict[int, list[int]] = {}

    def apply(self, ops: list[KvOp]) -> None:
        for op in ops:
            match op:
                case KvDrop(kv):
                    self.held.pop(kv, None)
                case KvCopy(source, target, count, _):
                    assert len(self.held[source]) >= count
                    self.held[target] = self.held[source][:count]

    def compute(self, pieces: list[StepPiece]) -> None:
        for sequence, start, stop in pieces:
            held = self.held.setdefault(sequence.kv or 0, [])
            assert len(held) >= start
            assert stop <= sequence.capacity
            held[start:] = sequence.ids[start:stop].tolist()
            assert held == sequence.ids[:stop].tolist()


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 120), st.integers(1, 30), st.sampled_from(["a", "b", None])),
        min_size=1,
        max_size=12,
    )
)
def test_every_sequence_ends_with_its_own_kv_within_the_budget(
    arrivals: list[tuple[int, int, int, str | None]],
) -> None:
    """Whatever arrives, all of it finishes, memory stays bounded, and no KV is ever that of other tokens."""
    schedule, memory, remaining = scheduler(sequences=3, step_tokens=32, kv_tokens=320), _Memory(), {}
    for family, length, outputs, session_id in arrivals:
        sequence = tokens(range(50), range(1000 * family, 1000 * family + length), room=outputs, session_id=session_id)
        remaining[sequence] = outputs
        schedule.add(sequence)
    while schedule.has_work:
        pieces = schedule.plan()
        memory.apply(schedule.take_kv_ops())
        memory.compute(pieces)
        schedule.complete(pieces)
        assert pieces
        assert schedule.used_tokens <= schedule.limits.kv_tokens
        for sequence in [piece.sequence for piece in pieces if piece.sequence.missing == 0]:
            sequence.append(7)
            remaining[sequence] -= 1
            if not remaining[sequence]:
                schedule.finish(sequence)
                del remaining[sequence]

    assert not remaining
