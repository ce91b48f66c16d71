"""Batches through AReaL's own engine and workflow executor, run by a Python that has AReaL: `areal_program.py WORK`.

Its client of SGLang servers takes the session server for one, finds it healthy, and never asks it for tokens: that is
what sessions do. Reads the question from standard input and writes `answer.json` in the folder WORK.
"""

import json
import sys
from pathlib import Path
from typing import Any

WORKFLOW = "harness.adapters.areal.SessionWorkflow"
VERSIONS = (7, 8, 9)


def is_rewarded(trajectory: dict[str, Any]) -> bool:
    """A dynamic filter."""
    return bool((trajectory["rewards"] > 0).all())


def run_batches(engine: Any, rows: list[dict[str, Any]], kwargs: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Trajectories of `rollout_batch`, one by one and in groups of two, and of three steps of `prepare_batch`."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    engine.set_version(VERSIONS[0])
    loader = StatefulDataLoader(rows, batch_size=2, collate_fn=list)
    batches = {
        "single": engine.rollout_batch(rows, WORKFLOW, kwargs),
        "grouped": engine.rollout_batch(rows, WORKFLOW, kwargs, group_size=2),
        "prepared": [],
    }
    for version in VERSIONS:
        engine.set_version(version)
        batches["prepared"] += engine.prepare_batch(loader, WORKFLOW, kwargs, should_accept_fn=is_rewarded)
    return batches


def main(work: Path) -> None:
    """Read the question, run it, write the answer."""
    from areal.api.cli_args import GenerationHyperparameters, InferenceEngineConfig
    from areal.engine.sglang_remote import RemoteSGLangEngine
    from areal.infra.rpc.serialization import deserialize_value, serialize_value
    from areal.utils import stats_tracker
    from areal.utils.data import concat_padded_tensors

    question = json.load(sys.stdin)
    kwargs = {**question["kwargs"], "gconfig": GenerationHyperparameters(max_new_tokens=64, max_tokens=512)}
    kwargs = deserialize_value(serialize_value(kwargs))  # as AReaL's controller hands them to its workers
    engine = RemoteSGLangEngine(
        InferenceEngineConfig(
            backend="sglang:d1", consumer_batch_size=2, max_head_offpolicyness=1, check_trajectory_format=True
        )
    )
    engine.initialize(addr=kwargs["session_server"].removeprefix("http://"))
    try:
        made = run_batches(engine, question["rows"], kwargs)
        padded = {name: concat_padded_tensors(batch) for name, batch in made.items()}  # as AReaL trains them
    finally:
        engine.destroy()
    answer = {
        "batches": {
            name: {column: value.tolist() for column, value in batch.items()} for name, batch in padded.items()
        },
        "rejected": stats_tracker.get("rollout").export()["rollout/rejected__count"],
    }
    (work / "answer.json").write_text(json.dumps(answer))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
