"""What a turn may use: overrides before wishes, limits before both, and seeds that anybody can recompute."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import LimitReached, PromptTooLong
from harness.sessions.admission import Limits, TurnPlace, plan_sampling, turn_seed
from harness.sessions.record import RecordIds, session_record
from harness.types import SamplingParams, SamplingWishes
from tests.builders import admit, assistant, finish, new_session, take_turn, user

HERE = TurnPlace(turns_before=0, prompt_length=10, key=b"key", ordinal=0)
NOTHING = SamplingWishes()


def test_what_the_agent_asks_for_is_used_when_nobody_objects():
    """Unstated parameters take their defaults; the rest of the context is the token budget."""
    asked = SamplingWishes(temperature=0.5, top_p=0.9, top_k=5, min_p=0.1, seed=3, stop=("END",), top_logprobs=2)

    params = plan_sampling(asked, NOTHING, Limits(), HERE, 100)

    assert params == SamplingParams(90, 0.5, 0.9, 5, 0.1, 3, ("END",), top_logprobs=2)


def test_the_rollout_overrides_the_agent():
    """Each parameter the rollout states replaces the agent's, zero included; the others stay."""
    asked = SamplingWishes(max_new_tokens=50, temperature=0.7, top_p=0.5, stop=("a",))
    overrides = SamplingWishes(max_new_tokens=20, temperature=0.0, stop=("b", "c"))

    params = plan_sampling(asked, overrides, Limits(), HERE, 100)

    assert params == SamplingParams(20, temperature=0.0, top_p=0.5, stop=("b", "c"))


def test_both_the_wish_and_what_was_used_are_recorded():
    """A record shows what an agent wanted and what the engine got."""
    session = new_session(sampling=SamplingWishes(temperature=0.0))
    turn = finish(session, admit(session, [user("a")], asked=SamplingWishes(temperature=0.7, max_new_tokens=5)))

    assert turn.sampling["asked"] == {"temperature": 0.7, "max_new_tokens": 5}
    [recorded] = session_record(session)["turns"]
    assert recorded["sampling"] == turn.sampling
    assert (recorded["prompt_length"], recorded["discarded"], recorded["unknown"]) == (7, [], [])
    assert recorded["weight_versions"] == [{"version": "0", "start": 0, "end": 3}]
    [segment] = recorded["segments"]
    assert [segment[name] for name in ("request_id", "start", "end", "finish_reason")] == ["0" * 32, 0, 3, "stop"]
    assert "prompt_ids" not in recorded
    [recorded] = session_record(session, RecordIds.PROMPTS)["turns"]
    assert recorded["prompt_ids"] == session.prompt_ids(turn).tolist()
    assert "context_ids" not in recorded
    assert turn.sampling["used"]["temperature"] == 0.0
    assert turn.sampling["used"]["max_new_tokens"] == 5


@pytest.mark.parametrize(
    ("asked", "limits", "budget"),
    [
        (None, Limits(), 90),
        (30, Limits(), 30),
        (5_000, Limits(), 90),
        (None, Limits(tokens_per_turn=7), 7),
        (30, Limits(tokens_per_turn=7), 7),
        (3, Limits(tokens_per_turn=7), 3),
        (None, Limits(tokens_per_session=25), 15),
        (None, Limits(tokens_per_session=1_000), 90),
        (30, Limits(tokens_per_turn=20, tokens_per_session=25), 15),
    ],
)
def test_limits_only_ever_shorten(asked, limits, budget):
    """The budget is the smallest of wish, turn limit, session limit and context."""
    params = plan_sampling(SamplingWishes(max_new_tokens=asked), NOTHING, limits, HERE, 100)

    assert params.max_new_tokens == budget


@pytest.mark.parametrize(
    ("asked", "override", "used"), [(None, None, 0), (4, None, 4), (4, 6, 6), (4, 0, 0), (99, None, 20)]
)
def test_an_output_must_not_be_longer_than_it_may_be(asked, override, used):
    """The least is bounded by the most, whoever stated either."""
    params = plan_sampling(
        SamplingWishes(min_new_tokens=asked, max_new_tokens=20),
        SamplingWishes(min_new_tokens=override),
        Limits(),
        HERE,
        100,
    )

    assert (params.min_new_tokens, params.max_new_tokens) == (used, 20)


def test_a_session_has_as_many_turns_as_its_limit():
    """Turns in flight count: two requests at once cannot both be the last one."""
    session = new_session(limits=Limits(turns=2))
    take_turn(session, [user("a")])
    admit(session, [user("b")])

    with pytest.raises(LimitReached, match="2 turns"):
        admit(session, [user("c")])

    assert len(session.turns_in_flight) == 1


def test_a_conversation_ends_where_the_session_limit_is():
    """A prompt that fills the limit is refused, one that leaves a single token is served."""
    session = new_session(limits=Limits(tokens_per_session=40))
    length = admit(session, [user("x")]).prompt_ids.size

    fits = admit(session, [user("x" * (40 - length))])
    with pytest.raises(LimitReached, match="40 tokens"):
        admit(session, [user("x" * (41 - length))])

    assert fits.params.max_new_tokens == 1


@pytest.mark.parametrize(("context", "fits"), [(10, False), (11, True)])
def test_a_prompt_leaves_room_for_one_token_at_least(context, fits):
    """A context that the prompt fills is too short, by name."""
    if fits:
        assert plan_sampling(NOTHING, NOTHING, Limits(), HERE, context).max_new_tokens == 1
    else:
        with pytest.raises(PromptTooLong, match=r"10 tokens.*10"):
            plan_sampling(NOTHING, NOTHING, Limits(), HERE, context)


def test_without_a_seed_of_the_rollout_the_agents_is_used():
    """An override derives a seed per turn; an agent's own seed reaches the engine as it stands."""
    session = new_session()

    assert admit(session, [user("a")], asked=SamplingWishes(seed=5)).params.seed == 5
    assert admit(session, [user("b")]).params.seed is None


def seeds_of(session, script):
    """Seeds of the requests in `script`, each answered at once."""
    return {tuple(m["content"] for m in messages): take(session, messages) for messages in script}


def take(session, messages):
    admission = admit(session, messages)
    finish(session, admission, "ok")
    return admission.params.seed


TITLE = [user("a title for: task")]
MAIN = [user("task")]
MORE = [user("task"), assistant("ok"), user("continue")]


@pytest.mark.parametrize("order", [[TITLE, MAIN, MORE], [MAIN, TITLE, MORE], [MAIN, MORE, TITLE]])
def test_seeds_do_not_depend_on_what_other_branches_do_meanwhile(order):
    """A side call keeps its seed whether it comes before, between or after the turns of the main branch (I10)."""
    expected = seeds_of(new_session(sampling=SamplingWishes(seed=7)), [TITLE, MAIN, MORE])

    assert seeds_of(new_session(sampling=SamplingWishes(seed=7)), order) == expected


def test_turns_and_resamples_have_seeds_of_their_own():
    """No two model calls of a session draw the same numbers."""
    session = new_session(sampling=SamplingWishes(seed=7))

    seeds = [take(session, messages) for messages in (MAIN, MAIN, MAIN, MORE, MORE, TITLE)]

    assert len(set(seeds)) == len(seeds)


def test_another_seed_of_the_session_is_another_seed_of_every_turn():
    """Samples of a group differ by their session's seed, and begin again with the seeds of any other machine."""
    left, right = (seeds_of(new_session(sampling=SamplingWishes(seed=seed)), [MAIN, MORE]) for seed in (1, 2))

    assert [*left.values()] == [3518755916855674384, 4721581009000639127]
    assert set(left.values()).isdisjoint(right.values())


@given(st.integers(0, 2**63 - 1), st.binary(min_size=16, max_size=16), st.integers(0, 1_000))
def test_a_seed_fits_every_engine(session_seed, key, ordinal):
    """63 bits, never negative."""
    assert 0 <= turn_seed(session_seed, key, ordinal) < 2**63


def test_a_turn_that_was_lost_in_a_crash_does_not_shift_seeds():
    """Of two equal requests only the second reached the disk: after the restart the next one has the third seed."""
    session = new_session(sampling=SamplingWishes(seed=7))
    lost, kept = admit(session, MAIN), admit(session, MAIN)
    turn = finish(session, kept)
    restarted = new_session(sampling=SamplingWishes(seed=7))
    restarted.restore(turn)

    retried = admit(restarted, MAIN)

    assert retried.params.seed == admit(session, MAIN).params.seed
    assert retried.params.seed not in {lost.params.seed, kept.params.seed}
