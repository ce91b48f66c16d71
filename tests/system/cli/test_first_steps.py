"""What somebody meets who uses the command line for the first time: mistakes are named, and ends are quiet."""

import asyncio
import json
import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from harness.cli.runs.run import run
from harness.engines.scripted import ScriptStep
from harness.suite.scenarios.folder import bundled_scenarios
from tests.harness_command import Ended, harness, start_harness, wait, write_scenario
from tests.session_servers.scripted import scripted_server
from tests.toy_model import write_toy_model


@pytest.fixture(name="toy")
def _toy(tmp_path: Path) -> Path:
    return write_toy_model(tmp_path / "toy")


@pytest.fixture(name="silent_url")
def _silent_url() -> Iterator[str]:
    """An address where somebody listens and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def _said(ended: Ended) -> str:
    """The last line on standard error."""
    return ended.stderr.rstrip().rpartition("\n")[2]


@pytest.mark.parametrize("arguments", [(), ("scenario",)])
def test_a_command_that_lacks_its_command_shows_its_help(arguments: tuple[str, ...]):
    """And no empty complaint behind it."""
    ended = harness(*arguments)

    assert ended.code == 4
    assert "Usage: harness" in ended.stdout + ended.stderr
    assert "harness: " not in ended.stderr


def test_an_unknown_engine_in_a_scenario_is_one_sentence(tmp_path: Path):
    """Not one sentence inside another."""
    scenario = write_scenario(tmp_path / "s", engine={"name": "locl"})
    ended = harness("scenario", "check", scenario)

    assert ended.code == 4
    assert ended.stderr.rstrip().endswith(
        "engine.name: no engine 'locl' in this version;"
        " expected one of local, scripted, sglang=URL[,URL], vllm=URL[,URL]"
    )


@pytest.mark.parametrize(
    "command", [("serve", "--engine", "scripted"), ("router", "--router-url", "http://127.0.0.1:9")]
)
def test_a_port_that_is_taken(toy: Path, silent_url: str, command: tuple[str, ...]):
    """It is looked at before a gateway is, and is no bug of ours."""
    port = silent_url.rpartition(":")[2]
    ended = harness(*command, "--tokenizer", toy, "--port", port)

    assert ended.code == 6
    assert _said(ended) == f"harness: cannot listen on 127.0.0.1:{port}: Address already in use; choose another --port"


async def test_a_session_server_is_no_engine(toy: Path):
    """Whoever mixes up two addresses is told so."""
    async with scripted_server(ScriptStep(text="Hello.")) as server:
        engine = f"sglang={server.url}"
        ended = await asyncio.to_thread(harness, "serve", "--engine", engine, "--tokenizer", toy, "--port", "0")

    assert ended.code == 6
    assert "is a session server: name the engine behind it" in _said(ended)


@pytest.mark.parametrize(
    "command",
    [("engine", "doctor", "{url}"), ("serve", "--engine", "sglang={url}", "--tokenizer", "{toy}", "--port", "0")],
)
def test_ctrl_c_ends_what_waits_for_an_engine(toy: Path, command: tuple[str, ...]):
    """At once, with a word and the documented code; the engine of this test never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        process = start_harness(*(part.format(url=url, toy=toy) for part in command))
        listener.settimeout(60)
        connection, _ = listener.accept()
        with connection:
            process.send_signal(signal.SIGINT)
            ended = wait(process)

    assert ended.code == 2, ended.stderr
    assert _said(ended) == "harness: interrupted"
    assert "Traceback" not in ended.stderr


@pytest.mark.model
@pytest.mark.parametrize(
    "command",
    [("verify", "engine", "local", "sglang={url}"), ("serve", "--engine", "local", "--port", "0")],
    ids=["verify", "serve"],
)
def test_ctrl_c_while_weights_are_loaded_is_quiet(model_dir: Path, silent_url: str, command: tuple[str, ...]):
    """A thread that is inside of torch does not make the process abort."""
    process = start_harness(*(part.format(url=silent_url) for part in command), "--model", model_dir)
    maps = Path(f"/proc/{process.pid}/maps")
    while "libtorch_cpu" not in maps.read_text():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    ended = wait(process)

    assert ended.code == 2, ended.stderr
    assert _said(ended) == "harness: interrupted"


@pytest.mark.model
def test_ctrl_c_while_a_lane_starts_ends_it(model_dir: Path, tmp_path: Path):
    """Its server ends with the command that waits for it, and no lane is left on record."""
    process = start_harness("engine", "up", "local", "--model", model_dir, env={"HARNESS_CACHE": str(tmp_path)})
    assert process.stderr is not None
    announced = process.stderr.readline()
    [server] = psutil.Process(process.pid).children()
    process.send_signal(signal.SIGINT)
    ended = wait(process)

    assert announced.startswith("starting local")
    assert ended.code == 2, ended.stderr
    assert _said(ended) == "harness: interrupted"
    assert not server.is_running()
    assert not [*(tmp_path / "engines" / "lanes").glob("*/state.json")]


def test_a_run_that_is_complete_is_not_run_again(tmp_path: Path):
    """Resumed, it says how it ended and where the report is; without `--resume` it is no scenario. No file changes."""
    scenario = write_scenario(tmp_path / "s", samples_per_prompt=1, prompts=[{"metadata": {"turns": 1}}])
    out = tmp_path / "run"
    assert harness("run", scenario, "--out", out).code == 0
    before = {path: path.read_bytes() for path in out.iterdir() if path.is_file()}

    again = harness("run", out, "--resume")
    as_json = harness("run", out, "--resume", "--json")
    anew = harness("run", out)

    assert (again.code, as_json.code, anew.code) == (0, 0, 4)
    assert _said(again) == f"already finished, passed: {out / 'result.json'}"
    assert as_json.document == json.loads(before[out / "result.json"])
    assert _said(anew) == f"harness: {out} is a run directory: add --resume to continue it"
    assert {path: path.read_bytes() for path in before} == before


def test_the_examples_of_run_name_what_there_is():
    """Wherever the harness is installed."""
    named = re.findall(r"`harness run ([^`\s]+)", run.__doc__ or "")

    assert len(named) == 6
    assert set(named) <= {folder.name for folder in bundled_scenarios()} | {"runs/DIR"}
