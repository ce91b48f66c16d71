"""`harness demo` and `init`: the harness in ten seconds, and a scenario to begin with, in the base install.

The scripted engine plays the guessing game of the quickstart. The last session is aborted in the middle of a turn, and
a fresh agent resumes it: recorded turns are answered from the record, and the aborted one continues from its tokens.
The store is left for `harness show`. `init` copies the bundled scenario `starter`, which runs as it is.
"""

import asyncio
import re
import runpy
import secrets
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer

from harness.cli import options, output
from harness.errors import RunError

if TYPE_CHECKING:
    from harness.samples.rollout import Rollout
    from harness.suite.scenarios.folder import ScenarioFolder
    from harness.types import Json, Message

_Out = Annotated[Path, options.option("HARNESS_OUT", "Output folder.")]

_TOKEN_DELAY_S = 0.02
"""Delay of the engine: a turn takes a third of a second, long enough to abort."""
_CUT_AFTER_ANSWERS = 2
_DEADLINE_S = 60.0


def demo(*, out: _Out = Path("demo"), as_json: options.Json = False) -> None:
    """Play a game on a scripted engine, abort a session and resume it: no model, no download, ten seconds.

    Example: `harness demo`
    """
    import uvloop

    from harness.lab.models.tokenizer_files import WORDS, write_small_tokenizer
    from harness.suite.scenarios.folder import find_scenarios

    store, tokenizer = out / "sessions.db", out / "tokenizer"
    look = f"harness show {quote(str(store))}"
    if store.exists():
        raise RunError(f"{store} exists: look at it with `{look}`, or choose another --out")
    write_small_tokenizer(tokenizer, WORDS)
    [folder] = find_scenarios("quickstart")
    session_id = uvloop.run(_play(folder, store, tokenizer))
    said = f"""all of it: {look}
the last one: {look} {session_id[:8]} --tokens
in a browser: harness view {quote(str(store))} --out {quote(str(out / "demo.html"))}"""
    document = {"store": str(store), "tokenizer": str(tokenizer), "session_id": session_id}
    output.print_result(document, said, as_json=as_json)


async def _play(folder: "ScenarioFolder", store: Path, tokenizer: Path) -> str:
    """Play every prompt of `folder` once, cut the last one short, and return the id of the session that resumes it."""
    import msgspec

    from harness.engines.scripted import Script, ScriptedEngine
    from harness.rollouts.agents.task import AgentTask, FunctionAgent
    from harness.rollouts.control.abort_report import Keep
    from harness.rollouts.manager import SessionManager
    from harness.server.http.access import new_admin_token
    from harness.server.serving import serve
    from harness.server.settings import ServerSettings
    from harness.server.store.sqlite import SQLiteStore
    from harness.tokens.model_family import open_chat_tokenizer

    chat_tokenizer = open_chat_tokenizer(tokenizer)
    steps = Script.load(folder.file(str(folder.scenario.engine.script))).steps
    slow = Script(tuple(msgspec.structs.replace(step, token_delay_s=_TOKEN_DELAY_S) for step in steps))
    engine = ScriptedEngine(chat_tokenizer.tokenizer, slow)
    settings = ServerSettings(admin_token=new_admin_token())
    game = runpy.run_path(str(folder.file(str(folder.scenario.agent.game))))["Game"]
    scenario, answers = folder.scenario, Counter[int]()
    agent = FunctionAgent("player", _guess, kwargs={"game": game, "answers": answers})
    async with (
        serve(engine, chat_tokenizer, SQLiteStore(store), settings) as server,
        SessionManager(server.url, engines=[engine], admin_token=settings.admin_token) as manager,
    ):
        *first, last = [
            AgentTask(
                *(agent, folder.text_of(prompt), store.parent / "agents" / str(number), "scripted"),
                deadline_s=_DEADLINE_S,
                request_kwargs=scenario.agent.request_kwargs,
                metadata=prompt.metadata | {"number": number},
            )
            for number, prompt in enumerate(scenario.prompts)
        ]
        output.say(f"{len(first)} games on the scripted engine:")
        for rollout in await asyncio.gather(*map(manager.run, first)):
            _tell(rollout)
        output.say("a game that is aborted in the middle of a turn:")
        pending = asyncio.create_task(manager.run(last))
        async with asyncio.timeout(_DEADLINE_S):
            # The engine has no callback for this.
            while answers[len(first)] < _CUT_AFTER_ANSWERS or not any(live.sampled for live in engine.live):  # noqa: ASYNC110
                await asyncio.sleep(_TOKEN_DELAY_S / 4)
        report = await manager.abort([pending], keep=Keep.SESSIONS)
        _tell(report.rollouts[0])
        output.say("the same game, resumed by a restarted agent:")
        again = secrets.token_hex(16)
        engine.play_from(again, _CUT_AFTER_ANSWERS + 1)  # it continues in the step that was cut
        resumed = replace(
            last,
            resumes=report.rollouts[0].session_id,
            session={"session_id": again},
            workdir=store.parent / "agents" / "again",
        )
        _tell(await manager.run(resumed))
        return again


async def _guess(
    *,
    base_url: str,
    api_key: str,
    prompt: str,
    request_kwargs: "Json",
    metadata: "Json",
    game: Callable[["Json"], Any],
    answers: Counter[int],
    **_: Any,
) -> "Json":
    """Play: ask the model, let the game answer, until one of them ends it."""
    import httpx

    from harness.viewer.terminal import message_text

    playing = game(metadata["game"])
    messages: list[Message] = [{"role": "system", "content": prompt}, *playing.examples()]
    hint: str | None = playing.opening()
    authorization = {"authorization": f"Bearer {api_key}"}
    async with httpx.AsyncClient(headers=authorization, timeout=_DEADLINE_S, trust_env=False) as client:  # no proxy
        while hint is not None:
            messages.append({"role": playing.reply_role, "content": hint})
            answer = await client.post(f"{base_url}/chat/completions", json={"messages": messages, **request_kwargs})
            answer.raise_for_status()
            reply: Message = answer.json()["choices"][0]["message"]
            messages.append(reply)
            answers[metadata["number"]] += 1
            hint = playing.reply(message_text(reply))
    result: Json = playing.result()
    return result | {"reward": float(result["found"])}


def _tell(rollout: "Rollout") -> None:
    from harness.decoding import convert
    from harness.sessions.ledger import Ledger
    from harness.viewer.terminal import ledger_words

    turns, result = rollout.session["turns"], rollout.agent_result or {}
    found = f", found {result['secret']}" if result.get("found") else ""
    ledger = ledger_words(convert(rollout.session["ledger"], Ledger))
    output.say(f"{rollout.outcome.kind} after {len(turns)} turns{found}: {ledger}")


_Directory = Annotated[Path, typer.Argument(metavar="[DIR]", help="New or empty folder.", show_default=False)]

_STARTER = "starter"
_SCRIPT_FILE = "script.toml"


def init(directory: _Directory = Path(), *, as_json: options.Json = False) -> None:
    """Write a scenario with an agent and a check, which runs at once: no model, no download.

    Exit codes: 0 written, 4 the folder is not empty, 6 it cannot be written.

    Example: `harness init my-task`, then `harness run my-task`
    """
    import msgspec

    from harness.machine.disk import disk_failures
    from harness.rollouts.agents.programs import bundled_directory
    from harness.suite.scenarios.folder import SCENARIO_FILE
    from harness.suite.scenarios.schemas import name_schema, schema_file, schema_of

    source = bundled_directory("scenarios") / _STARTER
    with disk_failures(directory):
        if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
            raise RunError(f"{directory} exists and is not empty: choose another folder")
        directory.mkdir(parents=True, exist_ok=True)
        files = sorted(path for path in source.iterdir() if path.is_file() and path.name != SCENARIO_FILE)
        for file in files:
            shutil.copyfile(file, directory / file.name)
        script = directory / _SCRIPT_FILE
        script.write_text(name_schema("script", script.read_text(encoding="utf-8")), encoding="utf-8")
        for kind in ("scenario", "script"):
            text = msgspec.json.format(msgspec.json.encode(schema_of(kind)), indent=2).decode()
            (directory / schema_file(kind)).write_text(f"{text}\n", encoding="utf-8")
        # Last, because it makes the folder a scenario. It takes the folder's name, by which a suite identifies it.
        text = (source / SCENARIO_FILE).read_text(encoding="utf-8")
        name = directory.resolve().name
        if re.fullmatch("[a-z0-9][a-z0-9_-]*", name):
            text = text.replace(f'name = "{_STARTER}"', f'name = "{name}"', 1)
        (directory / SCENARIO_FILE).write_text(name_schema("scenario", text), encoding="utf-8")
    names = sorted(path.name for path in directory.iterdir())
    said = f"{directory}: {', '.join(names)}\nrun it with: harness run {quote(str(directory))}"
    output.print_result({"directory": str(directory.resolve()), "files": names}, said, as_json=as_json)
