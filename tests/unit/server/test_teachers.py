"""Teachers score what was sampled, in its exact context, while the agent continues; what they miss is named."""

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.dialects.request_limits import RequestLimits
from harness.engines.scripted import Script, ScriptedEngine, ScriptStep, scripted_logprobs
from harness.engines.teachers import TeachAfter, TeacherSpec, check_teachers
from harness.errors import (
    EngineConnectionLost,
    EngineError,
    EngineRejected,
    EngineUnavailable,
    ScenarioError,
    TokenizerMismatch,
)
from harness.samples.codec import sample_from_json
from harness.samples.merge import NOT_IN_TIME
from harness.server import teachers
from harness.server.settings import ServerSettings
from harness.server.teachers import TOO_LONG
from harness.sessions.session import Session
from harness.sessions.teaching import next_teaching, teach
from harness.top_logprobs import TopLogprobs
from harness.types import Message, PromptLogprobs, Sample, TokenIds
from tests.builders import toy_tokenizer, user
from tests.session_servers.served import Client, Served, SetClock, eventually, says, serving, session_on
from tests.thoroughness import examples

Answer = Callable[[PromptLogprobs], PromptLogprobs]


class Teacher(ScriptedEngine):
    """Scores under version `t0`, with what `answer` makes of it; counts what it is asked."""

    def __init__(self, answer: Answer = lambda scoring: scoring, *, context_length: int = 1 << 20) -> None:
        super().__init__(toy_tokenizer(), Script(says("unused")), context_length=context_length)
        self.answer = answer
        self.asked: list[tuple[int, int]] = []

    async def score(
        self, input_ids: TokenIds, *, start: int, session_id: str | None = None, top: int = 0
    ) -> PromptLogprobs:
        self.asked.append((start, input_ids.size))
        return self.answer(await super().score(input_ids, start=start, session_id=session_id, top=top))


def with_teachers(*specs: TeacherSpec, **settings: Any) -> ServerSettings:
    return ServerSettings(teachers=specs, **settings)


def one(teacher: ScriptedEngine, after: TeachAfter = TeachAfter.TURN, top_k: int = 0) -> ServerSettings:
    return with_teachers(TeacherSpec("big", lambda: teacher, after, top_k))


async def collect(client: Client[Any], session: Served) -> list[Sample]:
    return [sample_from_json(each) for each in await client.samples(session)]


def must_be_taught(sample: Sample, versions: Sequence[str] = ("0",), name: str = "big") -> None:
    """Each sampled token has the teacher's logprob in its context; nothing else has one."""
    column, start = sample.teachers[name], sample.tokens.size - sample.response_length
    true = {version: scripted_logprobs(sample.tokens, 0, version)[start:] for version in versions}
    is_sampled = sample.behavior_versions >= 0
    assert np.array_equal(~np.isnan(column), is_sampled)
    assert np.any([column[is_sampled] == each[is_sampled] for each in true.values()], axis=0).all()
    assert sample.metadata["teachers"][name] == {"versions": sorted(versions), "missing": 0}


async def test_every_sampled_token_has_its_teachers_logprob() -> None:
    """Across branches and updates of the policy; each turn is asked for once, from its first token on."""
    teacher = Teacher()
    async with session_on(*says("one", "two", "three", "four"), settings=one(teacher)) as (client, session):
        history = await client.converse(session, 2)
        await client.engine.update_weights(Path("w"), "1")
        await client.converse(session, 1, history)
        await client.converse(session, 1, history[:2])
        samples = await collect(client, session)

    assert len(samples) == 2
    for sample in samples:
        must_be_taught(sample)
    assert len({*teacher.asked}) == len(teacher.asked) == 4


async def test_a_turn_is_scored_while_the_tool_runs() -> None:
    """Nobody has collected yet."""
    teacher = Teacher()
    async with session_on(*says("one", "two"), settings=one(teacher)) as (client, session):
        history = await client.converse(session, 1)
        held = client.server.sessions.in_memory(session.session_id)
        assert held is not None
        await eventually(lambda: "big" in held.turn(0).teachers)
        await client.converse(session, 1, history)
        await eventually(lambda: "big" in held.turn(1).teachers)
        assert len(teacher.asked) == 2
        await collect(client, session)
    assert len(teacher.asked) == 2


async def test_a_teacher_of_the_end_scores_all_turns_at_once() -> None:
    """One request, when samples are collected."""
    teacher = Teacher()
    async with session_on(*says("one", "two", "three"), settings=one(teacher, TeachAfter.END)) as (client, session):
        await client.converse(session, 3)
        assert teacher.asked == []
        [sample] = await collect(client, session)
    must_be_taught(sample)
    assert len(teacher.asked) == 1


async def test_versions_are_the_teachers_own() -> None:
    """A teacher that changes its weights in mid-rollout says so."""
    teacher = Teacher()
    async with session_on(*says("one", "two"), settings=one(teacher)) as (client, session):
        history = await client.converse(session, 1)
        await eventually(lambda: len(teacher.asked) == 1)
        await teacher.update_weights(Path("w"), "7")
        await client.converse(session, 1, history)
        [sample] = await collect(client, session)
    must_be_taught(sample, ("0", "7"))


async def test_sessions_choose_their_teachers() -> None:
    """All by default; none for an evaluation; an unknown one is refused by name."""
    specs = [TeacherSpec(name, Teacher) for name in ("big", "small")]
    async with serving(settings=with_teachers(*specs)) as client:
        both, none = await client.create(), await client.create(teachers=[])
        small = await client.create(teachers=["small"])
        for session in (both, none, small):
            await client.converse(session, 1)
        columns = [[*sample.teachers] for session in (both, none, small) for sample in await collect(client, session)]
        refused = await client.http.post("/sessions", json={"teachers": ["tall"]})
    assert columns == [["big", "small"], [], ["small"]]
    assert refused.status_code == 400
    assert "teachers: expected some of big, small; got tall" in refused.text


def must_have_tops(sample: Sample, top_k: int) -> None:
    """Each sampled token has the teacher's most likely ones, as a scripted engine makes them; nothing else has some."""
    top, is_sampled = sample.teacher_tops["big"], sample.behavior_versions >= 0
    tokens, rank = sample.tokens[-sample.response_length :][is_sampled], np.arange(top_k)
    assert np.array_equal(top.ids[is_sampled], (tokens[:, None] + rank) % toy_tokenizer().vocab_size)
    assert np.array_equal(top.logprobs[is_sampled], (sample.teachers["big"][is_sampled, None] - rank).astype("f4"))
    assert (top.ids[~is_sampled] == -1).all()
    assert np.isnan(top.logprobs[~is_sampled]).all()


async def test_most_likely_tokens_survive_branches_eviction_restart_and_inheritance(tmp_path: Path) -> None:
    """They are stored and shared with the scores: nothing is asked for again."""
    clock, store, teacher = SetClock(), tmp_path / "s.db", Teacher()
    paging = with_teachers(TeacherSpec("big", lambda: teacher, top_k=3), idle_page_out_s=60.0)
    async with session_on(*says("one", "two", "three"), store=store, settings=paging, clock=clock) as (client, session):
        history = await client.converse(session, 2)
        await client.converse(session, 1, history[:2])
        branches = await collect(client, session)
        held = client.server.sessions.in_memory(session.session_id)
        assert held is not None
        await eventually(lambda: all(turn.delivered for turn in held.turns))
        await client.server._turns.store.set_phase(held)  # behind the notes of deliveries
        clock.now += 60.0
        await client.server.sessions.page_out_idle()
        assert client.server.sessions.in_memory(session.session_id) is None
        branches += await collect(client, session)
        await client.http.post(f"/sessions/{session.session_id}/end")
    async with serving(*says("four"), store=store, settings=one(teacher, top_k=3)) as client:
        heir = await client.create(inherits={"session_id": session.session_id})
        assert await client.converse(heir, 2) == history
        await client.converse(heir, 1, history)
        branches += await collect(client, heir)
    assert len(branches) == 5
    for sample in branches:
        must_be_taught(sample)
        must_have_tops(sample, 3)
    assert len(teacher.asked) == 4


async def test_more_most_likely_tokens_than_the_engine_returns_are_refused() -> None:
    """By name, and nothing is asked."""
    teacher = Teacher()
    async with session_on(*says("one"), settings=one(teacher, top_k=6)) as (client, session):
        await client.converse(session, 1)
        [sample] = await collect(client, session)
    assert sample.metadata["teachers"]["big"]["reason"] == "engine_rejected"
    assert (teacher.asked, sample.teacher_tops) == ([], {})


async def test_most_likely_tokens_beyond_the_limit_in_bytes_are_missing() -> None:
    """With their scores; turns are served on."""
    bound = with_teachers(
        TeacherSpec("big", Teacher, top_k=3), TeacherSpec("small", Teacher), limits=RequestLimits(session_row_bytes=1)
    )
    async with serving(*says("one", "two"), settings=bound) as client:
        session = await client.create()
        history = await client.converse(session, 1)
        await collect(client, session)
        await client.converse(session, 1, history)
        [sample] = await collect(client, session)
    told = sample.metadata["teachers"]["big"]
    assert (told["missing"], told["reason"]) == (4, "over_limit")
    assert np.isnan(sample.teachers["big"][sample.behavior_versions >= 0]).sum() == 4
    must_be_taught(sample, name="small")


WRONG_TOPS: Mapping[str, Answer] = {
    "none": lambda scoring: replace(scoring, top=None),
    "too few": lambda scoring: replace(scoring, top=scoring.top and scoring.top.part(1, len(scoring.top.ids))),
    "NaN": lambda scoring: replace(scoring, top=TopLogprobs(_top(scoring).ids, _top(scoring).logprobs * np.nan)),
    "positive": lambda scoring: replace(scoring, top=TopLogprobs(_top(scoring).ids, -_top(scoring).logprobs)),
    "negative ids": lambda scoring: replace(scoring, top=TopLogprobs(~_top(scoring).ids, _top(scoring).logprobs)),
}


def _top(scoring: PromptLogprobs) -> TopLogprobs:
    assert scoring.top is not None
    return scoring.top


def _broken(error: EngineError) -> Answer:
    def fail(_: PromptLogprobs) -> PromptLogprobs:
        raise error

    return fail


WRONG: Mapping[str, Answer] = {
    "NaN": lambda scoring: replace(scoring, logprobs=np.full_like(scoring.logprobs, np.nan)),
    "positive": lambda scoring: replace(scoring, logprobs=np.full_like(scoring.logprobs, 0.5)),
    "too few": lambda scoring: replace(scoring, logprobs=scoring.logprobs[:-1]),
    "too many": lambda scoring: replace(scoring, logprobs=np.repeat(scoring.logprobs, 2)),
    "another start": lambda scoring: replace(scoring, start=scoring.start + 1),
}


@pytest.mark.parametrize(
    ("answer", "top_k"),
    [*((answer, 0) for answer in WRONG.values()), *((answer, 3) for answer in WRONG_TOPS.values())],
    ids=[*WRONG, *(f"most likely: {name}" for name in WRONG_TOPS)],
)
async def test_a_wrong_answer_is_missing(answer: Answer, top_k: int) -> None:
    """Nothing false is kept, nothing is zero, and the turn was served; a score goes with its most likely tokens."""
    async with session_on(*says("one"), settings=one(Teacher(answer), top_k=top_k)) as (client, session):
        await client.converse(session, 1)
        [sample] = await collect(client, session)
    assert (np.isnan(sample.teachers["big"]).all(), sample.teacher_tops) == (True, {})
    missing = int((sample.behavior_versions >= 0).sum())
    told = {"versions": [], "missing": missing, "reason": "engine_reply_invalid"}
    assert sample.metadata["teachers"]["big"] == told


async def test_a_turn_beyond_the_teachers_context_is_missing() -> None:
    """Earlier ones are scored."""
    async with session_on(*says("one", "two"), settings=one(Teacher(context_length=60))) as (client, session):
        history = await client.converse(session, 1)
        await client.converse(session, 1, [*history[:1], history[1]])
        [sample] = await collect(client, session)
    column, is_sampled = sample.teachers["big"], sample.behavior_versions >= 0
    ends = sample.tokens.size - sample.response_length + np.flatnonzero(is_sampled & ~np.isnan(column))
    assert 0 < ends.size < is_sampled.sum()
    assert ends.max() < 60
    assert sample.metadata["teachers"]["big"]["reason"] == TOO_LONG


async def test_a_teacher_that_does_not_score_is_named() -> None:
    """The turn was served, and its tokens are missing."""
    teacher = Teacher(_broken(EngineRejected("this engine scores nothing")))
    async with session_on(*says("one"), settings=one(teacher)) as (client, session):
        await client.converse(session, 1)
        [sample] = await collect(client, session)
        metrics = (await client.http.get("/metrics")).text
    assert np.isnan(sample.teachers["big"]).all()
    assert sample.metadata["teachers"]["big"]["reason"] == "engine_rejected"
    assert 'harness_teacher_failures_total{code="engine_rejected",teacher="big"}' in metrics


@pytest.mark.parametrize("error", [EngineUnavailable("nobody answers"), TokenizerMismatch("has another tokenizer")])
async def test_a_teacher_that_is_away_is_named_and_waited_for_by_nobody(error: EngineError) -> None:
    """It comes back: what it missed is caught up."""
    away = True

    class Reached(Teacher):
        async def __aenter__(self) -> "Reached":
            if away:
                raise error
            await super().__aenter__()
            return self

    teacher = Reached()
    async with session_on(*says("one"), settings=one(teacher)) as (client, session):
        await client.converse(session, 1)
        [sample] = await collect(client, session)
        assert sample.metadata["teachers"]["big"]["reason"] == error.code
        away = False
        await eventually(lambda: bool(teacher.asked))
        [sample] = await collect(client, session)
        metrics = (await client.http.get("/metrics")).text
    must_be_taught(sample)
    assert 'harness_teacher_tokens_scored_total{teacher="big"} 4.0' in metrics
    assert 'harness_teacher_sessions_waiting{teacher="big"} 0.0' in metrics


async def test_a_request_that_breaks_the_teacher_is_not_repeated_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """After three attempts, that session goes without, and the next one is scored."""
    monkeypatch.setattr(teachers, "_FIRST_PAUSE_S", 0.001)
    breaks = True

    def answer(scoring: PromptLogprobs) -> PromptLogprobs:
        if breaks:
            raise EngineConnectionLost("gone")
        return scoring

    teacher = Teacher(answer)
    async with serving(*says("one"), settings=one(teacher)) as client:
        first, second = await client.create(), await client.create()
        await client.converse(first, 1)
        await eventually(lambda: len(teacher.asked) == 3)
        breaks = False
        await client.converse(second, 1)
        [sample] = await collect(client, second)
    must_be_taught(sample)
    assert len(teacher.asked) == 4


async def test_a_slow_teacher_delays_no_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor a collection for longer than its bound."""
    monkeypatch.setattr(teachers, "CATCH_UP_S", 0.05)
    blocked = asyncio.Event()

    class Slow(Teacher):
        async def score(self, input_ids: TokenIds, *, start: int, session_id: str | None = None) -> PromptLogprobs:
            await blocked.wait()
            return await super().score(input_ids, start=start, session_id=session_id)

    async with session_on(*says("one", "two"), settings=one(Slow())) as (client, session):
        await client.converse(session, 2)
        [sample] = await collect(client, session)
        assert sample.metadata["teachers"]["big"]["reason"] == NOT_IN_TIME
        blocked.set()
        await eventually(lambda: not client.server.teachers._teachers["big"]._done)
        [sample] = await collect(client, session)
    must_be_taught(sample)


_FAULTS: Mapping[str, Answer | None] = {
    **WRONG,
    "rejected": _broken(EngineError("no")),
    "lost": _broken(EngineConnectionLost("gone")),
    "away": _broken(EngineUnavailable("nobody answers")),
    "unknown": _broken(OSError("of a provider of one's own")),  # type: ignore[arg-type]
    "hangs": None,
    "none": None,
}


class Faulty(Teacher):
    """Has the next of `faults` at each request, and then none."""

    def __init__(self, faults: Sequence[str]) -> None:
        super().__init__(lambda scoring: scoring)
        self.faults = list(faults)

    async def score(
        self, input_ids: TokenIds, *, start: int, session_id: str | None = None, top: int = 0
    ) -> PromptLogprobs:
        name = self.faults.pop() if self.faults else "none"
        if name == "hangs":
            await asyncio.Event().wait()
        self.answer = _FAULTS[name] or (lambda scoring: scoring)
        return await super().score(input_ids, start=start, session_id=session_id, top=top)


EXAMPLES = int(os.environ.get("HARNESS_SOAK_EXAMPLES", examples(40)))


@pytest.mark.timeout(120 + 3 * EXAMPLES)
@settings(max_examples=EXAMPLES)
@given(
    faults=st.lists(st.sampled_from(sorted(_FAULTS)), max_size=6),
    moves=st.lists(st.sampled_from(["turn", "branch", "update"]), min_size=1, max_size=6),
)
async def test_no_fault_makes_a_score_false(faults: list[str], moves: list[str]) -> None:
    """What a teacher got wrong is asked for again with the next turn; the rest is right or missing by name."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(teachers, "CATCH_UP_S", 0.05)
        patched.setattr(teachers, "_FIRST_PAUSE_S", 0.001)
        samples = await _play(moves, Faulty(faults))

    for sample in samples:
        column, is_sampled = sample.teachers["big"], sample.behavior_versions >= 0
        true = scripted_logprobs(sample.tokens, 0, "0")[sample.tokens.size - sample.response_length :]
        is_taught = ~np.isnan(column)
        assert not (is_taught & ~is_sampled).any()
        assert np.array_equal(column[is_taught], true[is_taught])
        told = sample.metadata["teachers"]["big"]
        assert told["missing"] == (is_sampled & ~is_taught).sum()
        assert bool(told["missing"]) == ("reason" in told)


async def _play(moves: Sequence[str], teacher: Teacher) -> list[Sample]:
    """Every turn is answered, whatever the teacher does."""
    async with session_on(*says(*map(str, range(9))), settings=one(teacher)) as (client, session):
        history: list[Message] = []
        for number, move in enumerate(moves):
            if move == "update":
                await client.engine.update_weights(Path("w"), str(number + 1))
                continue
            history = await client.converse(session, 1, history[:2] if move == "branch" else history)
        return await collect(client, session)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("big", "expected NAME=ENGINE"),
        ("Big=scripted", "expected NAME=ENGINE"),
        ("big=local", "big=local=PATH"),
        ("rule=scripted=", "rule=scripted=PATH"),
        ("big=sglang", "expected the address of a server"),
        ("big=nothing", "no engine 'nothing'"),
    ],
)
def test_a_wrong_name_is_refused(text: str, said: str) -> None:
    with pytest.raises(ScenarioError, match=said):
        TeacherSpec.parse(text)


@pytest.mark.parametrize("engine", ["scripted={}", "local={}", "vllm=http://127.0.0.1:1,tokenizer={}"])
def test_a_file_that_is_not_there_is_refused_before_a_server_starts(engine: str, tmp_path: Path) -> None:
    settings = with_teachers(TeacherSpec.parse("big=" + engine.format(tmp_path / "absent")))
    with pytest.raises(ScenarioError, match="absent"):
        settings.check()


def test_names_are_distinct_and_no_teacher_is_the_policy() -> None:
    url = "http://127.0.0.1:3000"
    with pytest.raises(ScenarioError, match="got big twice"):
        check_teachers([TeacherSpec.parse("big=scripted")] * 2)
    with pytest.raises(ScenarioError, match="a server other than the one that samples"):
        check_teachers([TeacherSpec.parse(f"big=vllm={url}/")], "local", f"sglang=http://other,{url}#key=A")
    for same, policy in (
        ("http://localhost:3000", url),
        ("http://LOCALHOST:3000", url),
        ("http://[::1]:3000", "http://localhost:3000"),
        ("http://localhost", "http://127.0.0.1:80"),
        ("https://Engines.example", "https://engines.example:443"),
    ):
        with pytest.raises(ScenarioError, match="a server other than the one that samples"):
            check_teachers([TeacherSpec.parse(f"big=vllm={same}")], f"vllm={policy}")
    check_teachers([TeacherSpec.parse("big=sglang=http://127.0.0.1:3001")], f"sglang={url}")


async def test_a_takeover_moves_the_scores_of_several_teachers(tmp_path: Path) -> None:
    """In memory and in the store, from which a restarted server reads them."""
    big, store = Teacher(), tmp_path / "s.db"
    specs = [TeacherSpec("big", lambda: big), TeacherSpec("small", Teacher)]
    async with session_on(*says("one"), store=store, settings=with_teachers(*specs)) as (client, session):
        history = await client.converse(session, 1)
        await collect(client, session)
        await client.http.post(f"/sessions/{session.session_id}/drain")
        heir = await client.create(resumes=session.session_id)
    async with serving(*says("two"), store=store, settings=with_teachers(*specs)) as client:
        held = client.server.sessions.in_memory(heir.session_id)
        assert held is not None
        assert [*held.turn(0).teachers] == ["big", "small"]
        await client.converse(heir, 1, history)
        [sample] = await collect(client, heir)
    must_be_taught(sample)
    must_be_taught(sample, name="small")
    assert len(big.asked) == 2


async def test_an_aborted_turn_of_a_drained_session_is_scored() -> None:
    """It cannot change any more."""
    teacher = Teacher()
    slow = ScriptStep(text="a slow answer", token_delay_s=0.01)
    async with session_on(slow, settings=one(teacher)) as (client, session):
        async with asyncio.TaskGroup() as group:
            group.create_task(client.chat(session, [user("go")]))
            await client.sampling()
            await client.engine.abort(None)
            await client.http.post(f"/sessions/{session.session_id}/drain")
        [sample] = await collect(client, session)
    assert sample.status == "aborted"
    must_be_taught(sample)


async def test_scores_of_other_tokens_are_not_taken() -> None:
    """The turn changed while its teacher was asked."""
    async with session_on(*says("one"), settings=one(Teacher(), TeachAfter.END)) as (client, session):
        await client.converse(session, 1)
        held = client.server.sessions.in_memory(session.session_id)
        assert held is not None
        task = next_teaching(held, "big", 1 << 20)
        assert task is not None
        other = task._replace(input_ids=np.where(np.arange(task.input_ids.size) < task.start, task.input_ids, 7))
        scoring = PromptLogprobs(task.start, np.full(task.input_ids.size - task.start, -1.0, np.float32), "0")
        assert teach(held, "big", other, scoring) == []
        assert [turn.index for turn in teach(held, "big", task, scoring)] == [0]


async def test_a_session_that_cannot_be_planned_goes_without_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its selection function fails: other sessions are scored, by an engine that stays open."""
    monkeypatch.setattr(teachers, "count_untaught", _fails_for_marked(teachers.count_untaught))
    teacher = Teacher()
    async with serving(*says("one"), settings=one(teacher)) as client:
        bad, good = await client.create(metadata={"bad": True}), await client.create()
        await client.converse(bad, 1)
        await client.converse(good, 1)
        [sample] = await collect(client, good)
        assert not client.server.teachers._teachers["big"]._problem
    must_be_taught(sample)


def _fails_for_marked(count: Callable[..., int]) -> Callable[..., int]:
    def fail(session: Session, name: str) -> int:
        if session.config.metadata.get("bad"):
            raise RuntimeError("a broken selection")
        return count(session, name)

    return fail
