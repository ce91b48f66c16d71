"""Batches through verl's own agent loops, run by a Python that has verl: `verl_program.py WORK`.

Its data set, configuration, managers, workers on Ray, post-processing and queue, as its trainers call them; its client
of inference servers is there and is never asked. Reads the question from standard input and writes `answer.json` in
the folder WORK, where `model` is (a tokenizer and a configuration), and what the options name.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

OPTIONS = (
    "actor_rollout_ref.rollout.name=sglang",
    "actor_rollout_ref.rollout.agent.num_workers=2",
    "data.filter_overlong_prompts=False",
    "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
)
STEP = 5
QUEUE_S = 60.0


def read_batch(work: Path, rows: list[dict[str, Any]], config: Any) -> dict[str, Any]:
    """`rows` as verl's loader of data gives them."""
    import pandas as pd
    from transformers import AutoTokenizer
    from verl.utils.dataset.rl_dataset import RLHFDataset, collate_fn

    table = work / "rows.parquet"
    pd.DataFrame(rows).to_parquet(table)
    data = RLHFDataset(str(table), AutoTokenizer.from_pretrained(work / "model"), config.data)
    return collate_fn([data[each] for each in range(len(data))])


def run_manager(config: Any, given: dict[str, Any]) -> list[dict[str, Any]]:
    """What `AgentLoopManager` makes of a batch, one item for each sample."""
    from verl import DataProto
    from verl.experimental.agent_loop.agent_loop import AgentLoopManager
    from verl.workers.rollout.llm_server import LLMServerClient

    batch = DataProto.from_single_dict(given)
    batch.meta_info["global_steps"] = STEP
    made = AgentLoopManager.create(config, LLMServerClient(config)).generate_sequences(batch)
    columns = {**made.batch, **made.non_tensor_batch}
    return [
        {name: column[each].tolist() if name in made.batch else column[each] for name, column in columns.items()}
        for each in range(len(made))
    ]


def find_advantages(made: list[dict[str, Any]]) -> None:
    """Write into each item the advantage that verl's GRPO gives its trained tokens."""
    import numpy as np
    import torch
    from torch.nn.utils.rnn import pad_sequence
    from verl import DataProto
    from verl.trainer.ppo.core_algos import AdvantageEstimator
    from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories

    def pad(name: str) -> Any:
        return pad_sequence([torch.tensor(each[name]) for each in made], batch_first=True)

    uids = np.array([each["key"].rsplit("_", 2)[0] for each in made], dtype=object)
    batch = {"response_mask": pad("response_mask"), "token_level_rewards": pad("rm_scores")}
    data = DataProto.from_dict(tensors=batch, non_tensors={"uid": uids})
    estimator = AdvantageEstimator.GRPO
    found = compute_advantage_for_multi_trajectories(data, [each["key"] for each in made], estimator)
    for each, advantages, mask in zip(made, found.batch["advantages"], batch["response_mask"], strict=True):
        each["advantages"] = sorted(set(advantages[mask == 1].tolist()))


def run_queue(config: Any, given: dict[str, Any]) -> list[dict[str, Any]]:
    """What `AgentLoopManagerTQ` puts into the queue for a batch, one item for each sample, with its tags."""
    import transfer_queue
    from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ
    from verl.utils import tensordict_utils
    from verl.workers.rollout.llm_server import LLMServerClient

    config.transfer_queue.enable = True
    transfer_queue.init(config.transfer_queue)
    try:
        batch = tensordict_utils.get_tensordict(given)
        tensordict_utils.assign_non_tensor_data(batch, "global_steps", STEP)
        prompts = list(batch["uid"])
        tags = [{"is_prompt": True, "status": "pending", "global_steps": STEP} for _ in prompts]
        transfer_queue.kv_batch_put(keys=prompts, partition_id="train", tags=tags)
        manager = AgentLoopManagerTQ.create(config, LLMServerClient(config))  # its workers live as long as it does
        manager.generate_sequences(batch)
        last = time.monotonic() + QUEUE_S
        while (found := transfer_queue.kv_list("train")["train"]) is not None:
            if all(found[each]["status"] in ("finished", "failure") for each in prompts):
                break
            if time.monotonic() > last:
                raise TimeoutError(f"after {QUEUE_S} s in the queue: {found}")
            time.sleep(0.1)
        made = []
        for key in sorted(found.keys() - {*prompts}):
            fields = transfer_queue.kv_batch_get(keys=[key], partition_id="train")
            made.append(
                {"key": key, "tags": found[key]} | {name: plain(fields[name]) for name in sorted(fields.keys())}
            )
        find_advantages(made)
        return made
    finally:
        transfer_queue.close()


def plain(column: Any) -> Any:
    """The one value of a column, as JSON has it."""
    [value] = column.unbind() if hasattr(column, "unbind") else list(column)
    return value.tolist() if hasattr(value, "tolist") else value


def main(work: Path) -> None:
    """Read the question, run it, write the answer."""
    import ray
    import verl
    from hydra import compose, initialize_config_dir

    question = json.load(sys.stdin)
    with initialize_config_dir(str(Path(verl.__file__).parent / "trainer" / "config"), version_base=None):
        options = [*OPTIONS, f"actor_rollout_ref.model.path={work / 'model'}", *question["options"]]
        config = compose("ppo_trainer", overrides=options)
    ray.init(num_cpus=4, include_dashboard=False)  # processes, which share what there is
    try:
        batch = read_batch(work, question["rows"], config)
        answer = {"manager": run_manager(config, batch), "queue": run_queue(config, batch)}
    finally:
        ray.shutdown()
    (work / "answer.json").write_text(json.dumps(answer, default=lambda value: value.tolist()))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
