"""AReaL and verl themselves, with our adapters in them: what reaches a loss is what the engine sampled.

`HARNESS_AREAL_PYTHON` and `HARNESS_VERL_PYTHON` name Pythons of environments that have them, made as
docs/embedding.md says. Nothing of theirs is replaced but the inference servers, which sessions never ask.
"""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.engines.scripted import scripted_experts, scripted_logprobs
from harness.types import Json, as_ids
from tests.builders import toy_template
from tests.checkout import ROOT
from tests.session_servers.true_rows import ROUTER
from tests.toy_model import write_toy_model
from tests.unit.adapters.miles_runs import miles_run
from tests.unit.adapters.test_embedding_page import EXAMPLES, STEPS

QUESTIONS = {"6 x 7?": "42", "How many are six times seven?": "42", "7 x 6?": "43", "40 + 2?": None}
"""With the answers that are rewarded. The model says 42; at None the agent breaks off."""

PROMPT_ROOM = 64
"""Tokens of a prompt in verl's batch."""

BRANCHES = """
import httpx


async def run(base_url, prompt, request_kwargs, metadata, api_key, **_more):
    'Ask twice, and in all sessions of a group but its first one once more in a new context.'
    headers = {"authorization": f"Bearer {api_key}"}
    session = metadata.get("session_id", 1)
    async with httpx.AsyncClient(base_url=base_url, headers=headers, timeout=600, trust_env=False) as client:
        for branch in range(1 + min(1, session)):
            messages = list(prompt) if branch == 0 else [prompt[0], {"role": "user", "content": "Anew."}]
            for _ in range(2 - branch):
                answer = await client.post("/chat/completions", json={"messages": messages, **request_kwargs})
                messages += [answer.json()["choices"][0]["message"], {"role": "user", "content": "Go on."}]
    return {"reward": float(session == 0)}
"""
SEVERAL = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "All?"}]
"""The prompt of the row whose agent has branches."""

UNLABELED = "default"
"""What engines say whom nobody tells a version, as neither trainer does."""


def python_with(trainer: str) -> str:
    """The Python that has it; skips where none is named."""
    variable = f"HARNESS_{trainer.upper()}_PYTHON"
    if variable not in os.environ:
        pytest.skip(f"{variable} names no Python that has {trainer}")
    return os.environ[variable]


async def ask(python: str, program: str, work: Path, **question: Any) -> Any:
    """The answer of a program beside this file, which can import the agent of the example of AReaL."""
    (work / "sure_agent.py").write_text((EXAMPLES / "areal" / "sure_agent.py").read_text())
    (work / "branching_agent.py").write_text(BRANCHES)
    process = await asyncio.create_subprocess_exec(
        *(python, str(Path(__file__).with_name(program)), str(work)),
        stdin=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(work)])},
    )
    await process.communicate(json.dumps(question).encode())
    assert process.returncode == 0
    return json.loads((work / "answer.json").read_text())


def check_sequence(ids: list[int], mask: list[int], logprobs: list[float]) -> str:
    """The question that `ids` are about; what `mask` shows of them is all that the engine said, with its logprobs."""
    tokenizer = toy_template().tokenizer
    trained = [each for each, is_trained in zip(ids, mask, strict=True) if is_trained]
    assert tokenizer.decode(as_ids(trained)) == "".join(f"{step.text}<|im_end|>" for step in STEPS)
    expected = np.where(np.array(mask) == 1, scripted_logprobs(as_ids(ids), 0, UNLABELED), 0)
    np.testing.assert_allclose(logprobs, expected, rtol=1e-6)
    text = tokenizer.decode(as_ids(ids))
    [question] = [each for each in QUESTIONS if f"<|im_start|>user\n{each}<|im_end|>" in text]
    return question


async def test_areal_itself(tmp_path: Path) -> None:
    """Its executor and its staleness manager, its groups, its dynamic filter, its padding; None is its rejection."""
    python = python_with("areal")
    rows = [{"messages": [{"role": "user", "content": each}], "answer": right} for each, right in QUESTIONS.items()]
    async with miles_run(*STEPS) as run:
        run.engine.relabel(UNLABELED)
        kwargs = {"session_server": run.server.url, "agent": "sure_agent.run"}
        answer = await ask(python, "areal_program.py", tmp_path, rows=rows, kwargs=kwargs)

    asked = {}
    for name, batch in answer["batches"].items():
        asked[name] = []
        for made in (dict(zip(batch, row, strict=True)) for row in zip(*batch.values(), strict=True)):
            length = sum(made["attention_mask"])
            whole = {column: value[:length] for column, value in made.items() if column != "rewards"}
            asked[name].append(check_sequence(whole["input_ids"], whole["loss_mask"], whole["logprobs"]))
            assert made["rewards"] == float(QUESTIONS[asked[name][-1]] == "42")
            sampled = {
                version for version, is_ours in zip(whole["versions"], whole["loss_mask"], strict=True) if is_ours
            }
            assert sampled == {7} if name != "prepared" else sampled <= {7, 8, 9, 10}
            assert whole["versions"].count(-1) == length - sum(whole["loss_mask"])
    answered = [each for each, right in QUESTIONS.items() if right is not None]
    assert sorted(asked["single"]) == sorted(answered)
    assert sorted(asked["grouped"]) == sorted(answered * 2)
    assert len(asked["prepared"]) == 6
    assert {QUESTIONS[each] for each in asked["prepared"]} == {"42"}
    assert answer["rejected"] > 2  # the agent that breaks off, alone and as a group; and what the filter rejects


async def test_verl_itself(tmp_path: Path) -> None:
    """Both of its managers with their workers on Ray: hydra, its data set, its padding and its queue."""
    python = python_with("verl")
    config = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 259}
    (write_toy_model(tmp_path / "model") / "config.json").write_text(json.dumps(config))
    loop = tmp_path / "session_agent.yaml"
    options = [
        "actor_rollout_ref.rollout.enable_rollout_routing_replay=True",
        *("actor_rollout_ref.rollout.n=2", f"data.max_prompt_length={PROMPT_ROOM}", "data.max_response_length=512"),
        *(EXAMPLES / "verl" / "overrides.txt").read_text().replace("=session_agent.yaml", f"={loop}").split(),
    ]
    rows = [
        {"prompt": [{"role": "user", "content": each}], "uid": str(index), "extra_info": {"answer": right}}
        for index, (each, right) in enumerate(QUESTIONS.items())
    ]
    rows = [row | {"agent_name": "session_agent"} for row in rows]
    for uid in ("several", "others"):  # verl divides an even number among its two workers
        rows.append({"prompt": SEVERAL, "uid": uid, "extra_info": {"answer": ""}, "agent_name": "branching"})
    async with miles_run(*STEPS) as run:
        run.engine.relabel(UNLABELED)
        shown = (EXAMPLES / "verl" / "session_agent.yaml").read_text().replace("tool_agent", "sure_agent")
        shown = shown.replace("http://10.0.0.2:8000", run.server.url)
        loop.write_text(
            shown + shown.replace("sure_agent", "branching_agent").replace(": session_agent", ": branching")
        )
        answer = await ask(python, "verl_program.py", tmp_path, rows=rows, options=options)

    branching = {part: [each for each in answer[part] if each["raw_prompt"] == SEVERAL] for part in answer}
    answer = {part: [each for each in answer[part] if each["raw_prompt"] != SEVERAL] for part in answer}
    for made, uid in zip(branching["manager"], ("several", "others"), strict=True):
        check_branches(made | unpad(made), [each for each in branching["queue"] if each["key"].startswith(uid)])
    assert [len(answer[part]) for part in ("manager", "queue")] == [len(QUESTIONS), 2 * len(QUESTIONS)]
    for made in answer["manager"]:
        assert made["position_ids"] == [max(0, each) for each in (np.cumsum(made["attention_mask"]) - 1).tolist()]
        check_sample(made, unpad(made), step=0)  # its rows name no step
    for made in answer["queue"]:
        assert (made["tags"]["status"], made["position_ids"]) == ("success", list(range(len(made["input_ids"]))))
        assert made["loss_mask"] == made["response_mask"]
        check_sample(made | made["extra_fields"], made, step=4)  # the weights of step 5


def check_branches(one: Json, queued: list[Json]) -> None:
    """One output, or one for each branch; a rollout counts once in its group and has the weight 1."""
    assert [each["key"].partition("_")[2] for each in queued] == ["0_0", "1_0", "1_1"]
    assert one["harness"]["ledger"]["dropped"] == {"other_sample": sum(queued[2]["response_mask"])}
    assert [sum(each["response_mask"]) for each in (one, queued[1])] == [one["harness"]["ledger"]["trained"]] * 2
    stamps = [each["extra_fields"]["harness"] for each in queued]
    assert [each["ledger"]["dropped"] for each in stamps] == [{}] * 3
    assert sum(sum(each["response_mask"]) for each in queued[1:]) == stamps[1]["ledger"]["trained"]
    assert [stamps[0]["weight"], stamps[1]["weight"] + stamps[2]["weight"]] == pytest.approx([1.0, 1.0])
    assert [each["rm_scores"][-1] for each in queued] == [1.0, 0.0, 0.0]
    assert [each["advantages"] for each in queued] == [
        pytest.approx([each], rel=1e-4) for each in (2**-0.5, -(2**-0.5), -(2**-0.5))
    ]


def unpad(made: Json) -> Json:
    """The columns that verl has padded, left and right of what is in them."""
    prompt = sum(made["attention_mask"][:PROMPT_ROOM])
    response = sum(made["attention_mask"][PROMPT_ROOM:])
    whole = made["input_ids"][PROMPT_ROOM - prompt : PROMPT_ROOM + response]
    names = ("response_mask", "rollout_log_probs", "rm_scores")
    assert not any(any(made[name][response:]) for name in names)
    experts = made["routed_experts"][PROMPT_ROOM - prompt : PROMPT_ROOM + response]
    return {"input_ids": whole, "routed_experts": experts, **{name: made[name][:response] for name in names}}


def check_sample(made: Json, columns: Json, step: int) -> None:
    """A sample of the question in `made`: its sequence, its reward at the last token, its versions, its ledger."""
    question = made["raw_prompt"][0]["content"]
    mask, response = columns["response_mask"], len(columns["response_mask"])
    ids, before = columns["input_ids"], [0] * (len(columns["input_ids"]) - response)
    if QUESTIONS[question] is not None:
        assert check_sequence(ids, before + mask, before + columns["rollout_log_probs"]) == question
        assert sum(mask) == made["harness"]["ledger"]["trained"]
        # verl fills the row of the last token, which no request has read, and does not replay it.
        assert columns["routed_experts"][:-1] == scripted_experts(ROUTER, as_ids(ids[:-1]), 0, UNLABELED).tolist()
    else:
        assert (sum(mask), made["harness"]["outcome"]) == (0, "crashed")
    assert columns["rm_scores"] == [0] * (response - 1) + [float(QUESTIONS[question] == "42")]
    assert (made["min_global_steps"], made["max_global_steps"]) == (step, step)
