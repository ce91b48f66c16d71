"""One sample of miles: what the agent is called with, what comes back, and what is refused."""

import argparse
import asyncio
import math
import threading
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest

from harness import __version__
from harness.adapters.miles import Generate, RolloutFn, abort, close, convert
from harness.adapters.miles.rollouts import MilesRollouts, make_task
from harness.adapters.miles.settings import NO_LISTS, REFUSALS, SELECTION_DEPRECATED, read_settings
from harness.adapters.sampling import session_sampling
from harness.engines.scripted import ScriptedFault, ScriptStep
from harness.errors import AdapterError, SessionServerError
from harness.rollouts.agents.task import ProgramAgent
from harness.samples.rollout import OutcomeKind
from tests.logged import capture_logs
from tests.session_servers.scripted import canned_server, http_answer
from tests.session_servers.served import eventually
from tests.unit.adapters import miles_agents
from tests.unit.adapters.miles_agents import Play
from tests.unit.adapters.miles_runs import AGENTS, MilesRun, miles_args, miles_run

SHORT = (ScriptStep(text="One moment."), ScriptStep(text="Done."))
PROMPT = [{"role": "user", "content": "Do it."}]

PROGRAM = """
# /// script
# requires-python = ">=3.11"
# dependencies = []
# ///
import json, os, urllib.request

messages = json.load(open(os.environ["HARNESS_MESSAGES_FILE"]))
body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages}).encode()
headers = {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
urllib.request.urlopen(urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers))
metadata = json.load(open(os.environ["HARNESS_METADATA_FILE"]))
with open(os.environ["HARNESS_RESULT_FILE"], "w") as file:
    json.dump({"reward": 0.25, "roles": [message["role"] for message in messages], "seen": metadata,
               "said": os.environ.get("GREETING")}, file)
"""

pytestmark = pytest.mark.usefixtures("trainers")


@pytest.fixture(name="play")
def _play(monkeypatch: pytest.MonkeyPatch) -> Play:
    """Agents that wait for nothing."""
    play = Play()
    for update in play.updates.values():
        update.set()
    monkeypatch.setattr(miles_agents, "play", play)
    return play


def of_function(path: str) -> dict[str, Any]:
    """Options in which this function is the agent."""
    return {"harness_agent": None, "custom_agent_function_path": path}


def state_of(run: MilesRun) -> Any:
    from miles.rollout.inference_rollout.inference_rollout_common import GenerateState

    return GenerateState(run.args)


async def generate_all(state: Any, *, evaluation: bool = False, **sample: Any) -> Any:
    """What miles gets for one sample."""
    from miles.rollout.base_types import GenerateFnInput
    from miles.utils.types import Sample

    given = {"prompt": PROMPT, "index": 7, "group_index": 1, "metadata": {"index": 7, "group": 1}} | sample
    request = GenerateFnInput(state, Sample(**given), dict(state.sampling_params), evaluation)
    return (await state.generate_function(request)).samples


async def generate(state: Any, **sample: Any) -> Any:
    """The one sample of a rollout."""
    [made] = await generate_all(state, **sample)
    return made


async def test_an_agent_is_called_by_miles_contract(play: Play) -> None:
    """The session's address without `/v1`, the prompt as it is, sampling parameters, the sample's metadata."""
    options = ("--max-seq-len", "900")
    async with miles_run(*SHORT, options=options, rollout_stop_token_ids=[5]) as run:
        await generate(state_of(run))

    [given] = play.given
    assert given["prompt"] == PROMPT
    assert given["base_url"].startswith(f"{run.server.url}/sessions/")
    assert not given["base_url"].endswith("/v1")
    assert given["request_kwargs"] == {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "max_tokens": 1000,
        "stop_token_ids": [5],
    }
    assert given["metadata"].items() >= {"index": 7, "group": 1, "max_seq_len": 900}.items()
    assert given["metadata"]["session_server_id"] == run.server.url.removeprefix("http://")


async def test_a_sample_has_every_column_and_everything_it_had(play: Play) -> None:
    """Tokens, text, reward, versions, cache and time; label and metadata as they came."""
    async with miles_run(*SHORT) as run:
        state = state_of(run)
        sample = await generate(state, label="42", routing_key="r", train_metadata={"loss": "x"})

    sample.validate()
    stamps = sample.metadata["harness"]
    assert (sample.label, sample.routing_key, sample.metadata["group"], sample.rollout_id) == ("42", "r", 1, None)
    assert (sample.status.value, sample.reward, sample.non_generation_time) == ("completed", 1.0, 0.5)
    assert sample.response == state.tokenizer.decode(sample.tokens[-sample.response_length :])
    assert sample.response.startswith("One moment.")
    assert (stamps["turns"], stamps["outcome"], sample.weight_versions) == ([0, 1], "finished", ["0"])
    assert sample.prefix_cache_info.total_prompt_tokens > len(sample.tokens) - sample.response_length
    assert sample.train_metadata.keys() == {"loss", "behavior_versions", "proximal_versions", "proximal_log_probs"}
    assert all(type(each) is int for each in (*sample.tokens, *sample.loss_mask))
    assert all(math.isfinite(each) for each in sample.rollout_log_probs)


async def test_branches_become_a_list_that_counts_as_one_rollout(play: Play) -> None:
    """By default: they share the id of their rollout and its reward; miles weighs their tokens by that id."""
    changes = {"custom_agent_function_path": f"{AGENTS}.run_branches", "rewards_normalization": True}
    async with miles_run(*SHORT, **changes) as run:
        state = state_of(run)
        samples = await generate_all(state)
        others = await generate_all(state, index=8, metadata={"index": 8, "group": 1})

    assert [sample.metadata["harness"]["turns"] for sample in samples] == [[0], [1]]
    assert {sample.rollout_id for sample in samples} == {7}
    assert sum(sample.metadata["harness"]["weight"] for sample in samples) == 1
    for sample in samples:
        sample.validate()
    columns = convert(run.args, [*samples, *others[:1]])
    assert columns["rewards"] == pytest.approx([0.5, 0.5, -0.5])
    trained = sum(sum(sample.loss_mask) for sample in samples)
    assert columns["rollout_mask_sums"][:2] == [trained, trained]


async def test_branches_without_a_reward_of_the_agents_are_scored_once(play: Play) -> None:
    """A reward model would give each its own, and miles takes one for a rollout; where it fails they are ABORTED."""
    changes = {"custom_agent_function_path": f"{AGENTS}.run_branches_unscored"}
    async with miles_run(*SHORT, **changes) as run:
        state = state_of(run)
        samples = await generate_all(state)
        run.args.custom_rm_path = "no_such_module.rm"
        failed = await generate_all(state)

    assert [sample.reward for sample in samples] == [float(len(samples[-1].tokens))] * 2
    assert {sample.status.value for sample in samples} == {"completed"}
    assert {(sample.status.value, sample.reward) for sample in failed} == {("aborted", None)}


async def test_branches_that_a_limit_ended_are_scored_like_others(play: Play) -> None:
    options = ("--max-seq-len", "300")
    async with miles_run(*SHORT, options=options, custom_agent_function_path=f"{AGENTS}.run_branches") as run:
        metadata, prompt = {"index": 7, "group": miles_agents.ENDLESS}, [{"role": "system", "content": "Be brief."}]
        samples = await generate_all(state_of(run), metadata=metadata, prompt=prompt)

    assert len(samples) > 1
    assert {sample.metadata["harness"]["outcome"] for sample in samples} == {"limited"}
    assert len({sample.reward for sample in samples}) == 1
    assert samples[0].reward


@pytest.mark.parametrize(
    "changes",
    [
        {"group_rm": True},
        {"recompute_logprobs_via_prefill": True},
        {"use_dynamic_batch_size": False},
        {"train_backend": "fsdp"},
        {"custom_rm_path": f"{AGENTS}.rate"},
        {"harness_selection": "one"},
        {"harness_selection": "last"},
        {},
    ],
)
async def test_a_rollout_is_one_sample_where_miles_takes_no_lists(play: Play, changes: dict[str, Any]) -> None:
    """Its ledger says what became of the others. An evaluation takes one, whatever else is set."""
    changes = {"custom_agent_function_path": f"{AGENTS}.run_branches", **changes}
    async with miles_run(*SHORT, **changes) as run:
        made = await generate_all(state_of(run), evaluation=len(changes) == 1)

    ledger = made.metadata["harness"]["ledger"]
    assert (made.rollout_id, sum(made.loss_mask)) == (None, ledger["trained"])
    assert ledger["dropped"] == {"other_sample": ledger["generated"] - ledger["trained"]}
    assert ledger["dropped"]["other_sample"] > 0


async def test_an_agent_that_fails_is_an_aborted_sample(play: Play) -> None:
    """The run continues, and no column is None."""
    async with miles_run(*SHORT, custom_agent_function_path=f"{AGENTS}.crash") as run:
        sample = await generate(state_of(run))

    sample.validate()
    assert (sample.status.value, sample.reward) == ("aborted", None)
    assert sample.metadata["harness"]["outcome"] == "crashed"
    assert sample.metadata["harness"]["outcome_detail"]
    assert [sample.loss_mask, sample.rollout_log_probs, sample.tokens, sample.train_metadata["proximal_log_probs"]] == (
        [[]] * 4
    )


async def test_a_session_server_that_is_not_there_costs_samples_and_no_run(play: Play) -> None:
    async with miles_run(*SHORT) as run:
        run.args.harness_session_server = "http://127.0.0.1:9"
        state = state_of(run)
        first = await generate(state)
        assert (first.status.value, "127.0.0.1:9" in first.metadata["harness"]["outcome_detail"]) == ("aborted", True)


async def test_an_agent_that_is_not_there_is_named(play: Play) -> None:
    """With a rollout function that has not looked for it."""
    async with miles_run(*SHORT, custom_agent_function_path=f"{AGENTS}.no_such_agent") as run:
        with pytest.raises(AdapterError, match=r"^--custom-agent-function-path .*no_such_agent: AttributeError: "):
            await generate(state_of(run))


async def test_a_session_server_of_another_version_is_named(play: Play) -> None:
    """Its samples might be of another form: none is made."""
    description = {"harness": "0.0.1", "start": "s", "serves": {}, "engines": []}
    async with canned_server(http_answer(200, description)) as other, miles_run(*SHORT) as run:
        run.args.harness_session_server = other.url
        with pytest.raises(AdapterError, match=f"^{other.url} is of version 0.0.1, expected {__version__}$"):
            await generate(state_of(run))


async def test_a_module_may_ask_for_the_end_itself(play: Play, admin_token: str | None) -> None:
    """`abort(args)` returns when every rollout has ended; another run's continue, and new ones begin afterwards."""
    hangs = ScriptStep(text="An answer.", fault=ScriptedFault.HANG, fault_after=3)
    async with miles_run(hangs, *SHORT, admin_token=admin_token) as run:
        state = state_of(run)
        going = asyncio.create_task(generate(state))
        await eventually(lambda: any(live.sampled for live in run.engine.live))
        await abort(miles_args("--harness-session-server", run.server.url))
        assert not going.done()
        await abort(run.args)
        sample = await going
        assert (sample.status.value, len(run.server.server.sessions)) == ("aborted", 0)
        sample.validate()
        assert (sample.response_length, sample.metadata["harness"]["outcome"]) == (3, "drained")


async def test_after_an_abort_nothing_begins(play: Play) -> None:
    async with miles_run(*SHORT) as run:
        state = state_of(run)
        state.aborted = True
        assert (await generate(state)).status.value == "aborted"
        assert play.given == []
        state.reset()
        assert (await generate(state)).status.value == "completed"


async def test_a_directory_goes_while_the_loop_works(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long that takes, and whoever is cancelled meanwhile: nothing of it is left."""
    begun, may_go_on, directories = threading.Event(), threading.Event(), []

    class SlowDisk(TemporaryDirectory[str]):
        def cleanup(self) -> None:
            directories.append(Path(self.name))
            begun.set()
            assert may_go_on.wait(60)  # the loop has to get on to this
            super().cleanup()

    monkeypatch.setattr("harness.adapters.trainer_sessions.TemporaryDirectory", SlowDisk)
    async with miles_run(*SHORT) as run:
        going = asyncio.create_task(generate(state_of(run)))
        await eventually(begun.is_set)
        going.cancel()
        await asyncio.sleep(0)
        may_go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await going
    assert [directory.exists() for directory in directories] == [False]


async def test_a_cancelled_sample_leaves_nothing_behind(play: Play) -> None:
    """Miles cancels the siblings of a sample that raised."""
    hangs = ScriptStep(text="An answer.", fault=ScriptedFault.HANG, fault_after=3)
    async with miles_run(hangs) as run:
        going = asyncio.create_task(generate(state_of(run)))
        await eventually(lambda: any(live.sampled for live in run.engine.live))
        going.cancel()
        with pytest.raises(asyncio.CancelledError):
            await going
        assert len(run.server.server.sessions) == 0


@pytest.mark.parametrize("ticks", range(6))
async def test_a_rollout_that_begins_while_the_last_one_ends_goes_on(play: Play, tmp_path: Path, ticks: int) -> None:
    """What watched for the abort ends with the last rollout; the next one is not taken for aborted."""
    async with miles_run(*SHORT) as run:
        from miles.utils.misc import load_function

        state, rollouts = state_of(run), MilesRollouts(run.args, load_function)
        try:
            agent = await rollouts.open()
            sample = SimpleNamespace(index=7, group_index=1, prompt=PROMPT, metadata={"index": 7, "group": 1})
            tasks = [make_task(rollouts.settings, agent, sample, {}, tmp_path / str(number)) for number in range(2)]
            first = asyncio.create_task(rollouts.run(tasks[0], state))
            await asyncio.sleep(0)
            await asyncio.wait({*rollouts._running})
            for _ in range(ticks):
                await asyncio.sleep(0)
            second = await rollouts.run(tasks[1], state)
            assert [each and each.outcome.kind for each in (await first, second)] == [OutcomeKind.FINISHED] * 2
        finally:
            await rollouts.close()


def test_metadata_of_a_program_are_an_object(tmp_path: Path) -> None:
    settings = read_settings(miles_args("--harness-session-server", "http://s", "--harness-agent", "plain_chat"))
    sample = SimpleNamespace(index=7, group_index=1, prompt=PROMPT, metadata={"agent": "42"})
    with pytest.raises(AdapterError, match=r"^sample 7: metadata\['agent'\]: expected an object, got str$"):
        make_task(settings, ProgramAgent("probe", ("probe",)), sample, {}, tmp_path)


@pytest.mark.agent
async def test_a_program_in_the_place_of_an_agent_function(play: Play, tmp_path: Path) -> None:
    """It finds messages and metadata in files, without the answer; what it leaves as its result is in the sample."""
    script = tmp_path / "agent.py"
    script.write_text(PROGRAM)
    options = ("--harness-agent", str(script), "--harness-agent-env", "GREETING=hi=ho", "EMPTY=")
    options += ("--harness-trust-agent-result",)
    async with miles_run(*SHORT, options=options) as run:
        prompt = [{"role": "system", "content": "Be brief."}, *PROMPT]
        metadata = {"answer": "42", "tests": "x" * 200_000, "agent": {"game": {"rounds": 2}}}
        sample = await generate(state_of(run), prompt=prompt, metadata=metadata)

    sample.validate()
    assert (sample.status.value, sample.reward, sample.metadata["roles"]) == ("completed", 0.25, ["system", "user"])
    assert sample.metadata["seen"] == {"game": {"rounds": 2}, "index": 7, "group_index": 1}
    assert sample.metadata["said"] == "hi=ho"


@pytest.mark.parametrize(
    ("option", "changes"),
    [
        ("--use-rollout-indexer-replay", {"use_rollout_indexer_replay": True}),
        ("--lora-rank", {"lora_rank": 16}),
        ("--lora-adapter-path", {"lora_adapter_path": "/lora"}),
        ("--multi-lora-n-adapters", {"multi_lora_n_adapters": 2}),
        ("--multimodal-keys", {"multimodal_keys": {"image": "image"}}),
        ("--partial-rollout", {"partial_rollout": True}),
        ("--apply-chat-template", {"apply_chat_template": True}),
        ("--eval-num-gpus", {"eval_num_gpus": 8}),
        ("--rollout-top-k", {"rollout_top_k": 20, "use_tis": True}),
        ("--rollout-top-p", {"rollout_top_p": 0.9, "use_rollout_logprobs": True}),
        ("--group-rm", {"group_rm": True, "harness_selection": "all"}),
        ("--recompute-logprobs-via-prefill", {"recompute_logprobs_via_prefill": True, "harness_selection": "leaves"}),
        ("--use-dynamic-batch-size", {"use_dynamic_batch_size": False, "harness_selection": "all"}),
        ("--train-backend", {"train_backend": "fsdp", "harness_selection": "all"}),
        (
            "--dynamic-sampling-filter-path",
            {
                "dynamic_sampling_filter_path": "slime.rollout.filter_hub.dynamic_sampling_filters.check",
                "harness_selection": "my_selections:choose",
            },
        ),
        (
            "--rollout-function-path",
            {"rollout_function_path": "slime.rollout.fully_async_rollout.run", "harness_selection": "all"},
        ),
        (
            "--log-passrate",
            {
                "log_passrate": True,
                "custom_generate_function_path": "harness.adapters.slime.generate",
                "harness_selection": "all",
            },
        ),
    ],
)
async def test_what_cannot_be_kept_is_refused_by_name(play: Play, option: str, changes: dict[str, Any]) -> None:
    """Raised, not turned into samples: every one of them would be wrong."""
    given = ("--harness-session-server", "http://s", "--custom-agent-function-path", f"{AGENTS}.run")
    with pytest.raises(AdapterError, match=f"^{option} is not supported: "):
        read_settings(miles_args(*given, **changes))
    if "harness_selection" not in changes:
        async with miles_run(*SHORT, **changes) as run:
            with pytest.raises(AdapterError, match=f"^{option} is not supported: "):
                await generate(state_of(run))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora_rank": 16}, "^--lora-rank is not supported: "),
        ({"custom_generate_function_path": None}, "^--custom-generate-function-path: expected harness"),
        ({"harness_agent": "plain_caht"}, "^--harness-agent: no bundled agent 'plain_caht'"),
        ({"harness_agent": "no/agent.py"}, "^--harness-agent: no agent script at no/agent.py"),
        (of_function("no_such_module.run"), "^--custom-agent-function-path no_such_module.run: ModuleNotFoundError"),
        (of_function(f"{AGENTS}.no_such_agent"), "no_such_agent: AttributeError: "),
        (of_function(f"{AGENTS}.ENDLESS"), "ENDLESS: expected a function, got int"),
        ({"harness_agent_env": ["=sekret"]}, "^--harness-agent-env: expected NAME=VALUE, got one that begins with ''$"),
        ({"harness_agent_env": ["GREETING"]}, "^--harness-agent-env: expected NAME=VALUE"),
        (of_function(f"{AGENTS}.run") | {"harness_agent_env": ["A=1"]}, "^--harness-agent-env: a function has no"),
    ],
)
def test_our_rollout_function_refuses_when_it_is_made(changes: dict[str, Any], message: str) -> None:
    options = ("--harness-session-server", "http://s", "--harness-agent", "plain_chat")
    args = argparse.Namespace(**{**vars(miles_args(*options)), **changes})
    with pytest.raises(AdapterError, match=message):
        RolloutFn(SimpleNamespace(args=args, data_source=None))


async def test_a_step_that_cannot_begin_ends_the_run(play: Play) -> None:
    """Every group of it would be filtered out, for ever."""
    from miles.rollout.base_types import RolloutFnConstructorInput, RolloutFnTrainInput

    description = {"harness": "0.0.1", "start": "s", "serves": {}, "engines": []}
    async with canned_server(http_answer(200, description)) as other, miles_run(*SHORT) as run:
        for url, error in [(other.url, AdapterError), ("http://127.0.0.1:9", SessionServerError)]:
            args = argparse.Namespace(**{**vars(run.args), "harness_session_server": url})
            with pytest.raises(error, match=url.removeprefix("http://")):
                await RolloutFn(RolloutFnConstructorInput(args, None))(RolloutFnTrainInput(0))
            await close(args)


async def test_our_rollout_function_is_miles_own(play: Play) -> None:
    from miles.rollout.base_types import RolloutFnConstructorInput, RolloutFnTrainInput
    from miles.utils.types import Sample

    class OneGroup:
        def get_samples(self, count: int) -> list[list[Any]]:
            return [[Sample(index=i, prompt=PROMPT, metadata={"index": i, "group": 1}) for i in range(2)]]

    sizes = {"rollout_batch_size": 1, "n_samples_per_prompt": 2, "over_sampling_batch_size": 1}
    async with miles_run(*SHORT, **sizes) as run:
        output = await RolloutFn(RolloutFnConstructorInput(run.args, OneGroup()))(RolloutFnTrainInput(0))

    assert [[sample.reward for [sample] in group] for group in output.samples] == [[0.0, 1.0]]


def test_every_refusal_is_tested() -> None:
    marks = test_what_cannot_be_kept_is_refused_by_name.pytestmark
    [tested] = [{each[0] for each in mark.args[1]} for mark in marks if mark.name == "parametrize"]
    assert tested == {refusal.option for refusal in (*REFUSALS, *NO_LISTS)}


def test_an_old_name_of_a_selection_is_logged_once() -> None:
    """And resolves; one that is not there is named."""
    given = ("--harness-session-server", "http://s", "--harness-agent", "plain_chat")
    with capture_logs() as logs:
        found = [read_settings(miles_args(*given, harness_selection="main")).selection for _ in range(2)]
    assert found == ["all", "all"]
    warned = [log for log in logs if log["event"] == SELECTION_DEPRECATED and log["stated"] == "main"]
    assert [log["instead"] for log in warned] == ["all"]
    assert read_settings(miles_args(*given, harness_selection="my_selections:choose")).selection is not None
    with pytest.raises(AdapterError, match=r"^--harness-selection: expected all, one, or package.*; got 'turns'$"):
        read_settings(miles_args(*given, harness_selection="turns"))


@pytest.mark.parametrize(
    "changes",
    [
        {"rollout_top_k": 20},
        {"use_tis": True},
        {"group_rm": True},
        {"group_rm": True, "harness_selection": "one"},
        {"custom_rm_path": "my.rm", "harness_selection": "all"},
    ],
)
def test_what_can_be_kept_is_not_refused(changes: dict[str, Any]) -> None:
    """A filter where no ratio is taken; ratios without a filter; groups of single samples; a function for lists."""
    args = miles_args("--harness-session-server", "http://s", "--harness-agent", "plain_chat", **changes)
    assert read_settings(args).agent == "plain_chat"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--harness-agent", "plain_chat"), "--harness-session-server: expected"),
        (("--harness-session-server", "http://s"), "expected one of --custom-agent-function-path and --harness-agent"),
    ],
)
def test_options_that_are_missing_are_named(options: tuple[str, ...], message: str) -> None:
    with pytest.raises(AdapterError, match=message):
        read_settings(miles_args(*options))


def test_sampling_parameters_are_those_of_a_session() -> None:
    """SGLang's names and conventions become ours; how it writes text is nothing to a session."""
    given = {
        "max_new_tokens": 10,
        "min_new_tokens": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": -1,
        "stop": "END",
        "stop_token_ids": [3],
        "sampling_seed": 42,
        "no_stop_trim": True,
        "min_p": None,
    }
    assert session_sampling(given) == {
        "max_tokens": 10,
        "min_tokens": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 0,
        "stop": ["END"],
        "stop_token_ids": [3],
        "seed": 42,
    }
    with pytest.raises(AdapterError, match="'frequency_penalty' is not supported"):
        session_sampling({"frequency_penalty": 1.0})


def test_a_sample_of_another_interface_is_refused() -> None:
    """What is missing is named, and what was expected."""
    request = SimpleNamespace(state=None, sample=object(), sampling_params={})
    with pytest.raises(AdapterError, match=r"no group_index, .*expected the interface of miles 31f1ca96"):
        asyncio.run(Generate()(request))


def test_samples_of_somebody_else_are_no_columns() -> None:
    """And a batch size that miles decides beside the function is refused."""
    from miles.utils.types import Sample

    args = miles_args(custom_reward_post_process_path=None)
    with pytest.raises(AdapterError, match="sample 3: expected behavior_versions of 0 tokens"):
        convert(args, [Sample(index=3)])
    with pytest.raises(AdapterError, match=r"^--use-dynamic-global-batch-size is not supported"):
        convert(miles_args(use_dynamic_global_batch_size=True), [])


def test_miles_refuses_a_step_that_was_scored_in_part() -> None:
    """It takes the column for all samples, or for none; one without tokens needs no scores."""
    from miles.utils.types import Sample

    scored, empty, unscored = (Sample(index=index, response_length=size) for index, size in ((1, 2), (3, 0), (2, 2)))
    scored.teacher_log_probs = [-1.0, -2.0]
    advice = r"sample 2: expected teacher_log_probs, as sample 1 has, got none; .* in all samples.*the same --teacher"
    with pytest.raises(AdapterError, match=advice):
        convert(miles_args(), [scored, empty, unscored])
    with pytest.raises(AdapterError, match="expected behavior_versions"):
        convert(miles_args(custom_reward_post_process_path=None), [scored, empty])
    assert empty.teacher_log_probs == []
