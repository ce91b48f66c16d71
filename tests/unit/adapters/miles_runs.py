"""A run of miles on the scripted engine: its options, its data, its engines."""

import argparse
import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

from harness.adapters.miles import Generate, close
from harness.engines.base import PauseMode
from harness.engines.scripted import Script, ScriptedEngine, ScriptStep
from harness.server.serving import RunningServer, serve
from harness.server.settings import ServerSettings
from harness.server.store.sqlite import open_store
from tests.builders import toy_template

AGENTS = "tests.unit.adapters.miles_agents"

MILES_DEFAULTS: dict[str, Any] = {
    "rollout_batch_size": 8,
    "n_samples_per_prompt": 4,
    "over_sampling_batch_size": 16,
    "concurrency": 512,
    "rollout_temperature": 1.0,
    "rollout_top_p": 1.0,
    "rollout_top_k": -1,
    "rollout_max_response_len": 1000,
    "rollout_stop": None,
    "rollout_stop_token_ids": None,
    "rollout_skip_special_tokens": False,
    "custom_generate_function_path": "harness.adapters.miles.Generate",
    "custom_reward_post_process_path": None,
    "advantage_estimator": "grpo",
    "rewards_normalization": False,
    "grpo_std_normalization": False,
    "disable_rollout_trim_samples": False,
    "global_batch_size": 32,
    "reward_key": None,
    "dynamic_sampling_filter_path": f"{AGENTS}.keeps",
    "use_dynamic_global_batch_size": False,
    "use_rollout_routing_replay": False,
    "use_rollout_indexer_replay": False,
    "lora_rank": 0,
    "lora_adapter_path": None,
    "multi_lora_n_adapters": 0,
    "multimodal_keys": None,
    "partial_rollout": False,
    "apply_chat_template": False,
    "eval_num_gpus": 0,
    "use_tis": False,
    "use_rollout_logprobs": False,
    "group_rm": False,
}


def miles_args(*options: str, **changes: Any) -> argparse.Namespace:
    """Miles' arguments, those of the adapter read from `options`."""
    parser = argparse.ArgumentParser()
    Generate.add_arguments(parser)
    return argparse.Namespace(**{**MILES_DEFAULTS, **vars(parser.parse_args(options)), **changes})


class MilesRun(NamedTuple):
    """A session server, the engine behind it, and miles' arguments."""

    server: RunningServer
    engine: ScriptedEngine
    args: argparse.Namespace

    async def update(self, version: int) -> None:
        """New weights, as miles brings them: straight to the engine, without a word to the session server."""
        await self.engine.pause(PauseMode.ABORT)
        self.engine.relabel(str(version))
        await self.engine.resume()


@asynccontextmanager
async def miles_run(
    *steps: ScriptStep,
    options: tuple[str, ...] = (),
    admin_token: str | None = None,
    store: str | Path = "memory",
    make_engine: Callable[..., ScriptedEngine] = ScriptedEngine,
    **changes: Any,
) -> AsyncIterator[MilesRun]:
    """A run whose model says `steps` in every session; nothing of it is left afterwards."""
    chat_tokenizer = toy_template()
    engine = make_engine(chat_tokenizer.tokenizer, Script(steps))

    async def abort_engines() -> None:
        await engine.abort(None)

    async with serve(engine, chat_tokenizer, open_store(store), ServerSettings(admin_token=admin_token)) as server:
        given = ("--harness-session-server", server.url, *options)
        if "--harness-agent" not in options:
            given = ("--custom-agent-function-path", f"{AGENTS}.run", *given)
        args = miles_args(*given, tokenizer=chat_tokenizer.tokenizer, abort_engines=abort_engines, **changes)
        tasks = asyncio.all_tasks()
        try:
            yield MilesRun(server, engine, args)
        finally:
            await close(args)
        assert len(server.server.sessions) == 0
        left = [
            task for task in asyncio.all_tasks() - tasks if "miles" in task.get_name() or "adapter" in task.get_name()
        ]
        assert not left
