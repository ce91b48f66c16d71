"""The command line says what it offers, what is wrong with it, and ends with the code that fits."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from harness import __version__
from harness.lab.models import CATALOGUE
from harness.suite.record.config import Overrides, select
from harness.suite.record.rundir import RunDirectory
from tests.checkout import ROOT
from tests.harness_command import harness, write_scenario

SCENARIOS = ROOT / "scenarios"
HEAVY = (
    *("torch", "transformers", "pyarrow", "ray", "openai", "sglang", "vllm"),
    *("starlette", "uvicorn", "httpx", "numpy", "pydantic", "sqlite3"),
)


def test_help_imports_nothing_heavy():
    """Every subcommand imports what it needs when it runs."""
    code = (
        "import sys\nsys.argv = ['harness', '--help']\nfrom harness.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit:\n    print([name for name in sys.argv[1:] if name])\n"
        f"print('imported:', [name for name in {HEAVY} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.splitlines()[-1] == "imported: []"


def test_the_version_is_printed():
    """As the package says it."""
    assert harness("--version").stdout == harness("-V").stdout == f"harness {__version__}\n"


def test_the_help_has_the_commands_in_groups():
    """In eighty columns, without a word cut off."""
    shown = harness("--help", env={"COLUMNS": "80"}).stdout

    assert [line.split()[1] for line in shown.splitlines() if line.startswith("╭")] == [
        "Options",
        "Begin",
        "Run",
        "Look",
        "Serve",
        "Prepare",
    ]
    assert max(map(len, shown.splitlines())) <= 80
    assert "…" not in shown


def test_a_dry_run_says_what_would_run(tmp_path: Path):
    """And makes no directory; a training counts the rollouts of its steps."""
    wanted = ("--engine", "scripted", "--set", "limits.turns=3", "-n", "5", "--dry-run")
    planned = harness("run", "quickstart", *wanted, "--json", cwd=tmp_path).document["dry_run"]
    shown = harness("run", "quickstart", *wanted, cwd=tmp_path).stdout
    trained = harness("train", "train_tool_game", "--steps", "3", "--dry-run", "--json", cwd=tmp_path)
    rows = ("--filter", "metadata.turns=3", "--epochs", "3", "--limit", "1")
    fewer = harness("run", write_scenario(tmp_path / "s"), *rows, "--dry-run", cwd=tmp_path / "s").stdout
    shutil.rmtree(tmp_path / "s")
    shutil.rmtree(tmp_path / "toy")
    [scenario] = planned["scenarios"]

    assert (scenario["sessions"], scenario["prompts"], scenario["concurrency"]) == (8, 4, 5)
    assert (scenario["engine"]["name"], scenario["agent"], scenario["limits"]["turns"]) == ("scripted", "plain_chat", 3)
    assert shown.startswith("would run quickstart; nothing was started\nquickstart: 8 sessions, 4 prompts x 2 samples")
    assert "s: 6 sessions, 3 prompts x 2 samples" in fewer
    [training] = trained.document["dry_run"]["scenarios"]
    assert training["sessions"] % 3 == 0
    assert not any(tmp_path.iterdir())


def test_models_are_listed(tmp_path: Path):
    """With their folders, where they are in the cache."""
    listed = harness("model", "list", "--json", env={"HARNESS_CACHE": str(tmp_path)}).document["models"]

    assert [(each["model"], each["directory"]) for each in listed] == [(name, None) for name in CATALOGUE]


def test_open_shows_the_newest_run(tmp_path: Path):
    """Its page, beside the run, in the browser of the user; without a run it says what makes one."""
    none = harness("open", cwd=tmp_path)
    config = select(str(write_scenario(tmp_path / "s")), Overrides()).config
    for age, name in enumerate(("z-new", "a-old")):
        run = RunDirectory.create(tmp_path / "runs" / name, config)
        os.utime(run.config, (1_700_000_000 - age,) * 2)
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" >{tmp_path}/opened\n')
    browser.chmod(0o755)
    opened = harness("open", cwd=tmp_path, env={"BROWSER": f"{browser} %s"})

    assert (none.code, "expected a run in runs/, found none" in none.stderr) == (4, True)
    assert opened.code == 0, opened.stderr
    assert (tmp_path / "opened").read_text().strip() == (tmp_path / "runs/z-new.html").as_uri()
    assert (tmp_path / "runs/z-new.html").read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("run",), "expected a scenario, a suite or --harbor DIR, got none"),
        (("run", "--nope", "x"), "No such option: --nope"),
        (("run", "quickstart", "-n", "0"), "-n"),
        (("run", "quickstart", "--engine", "magic"), "magic"),
        (
            ("run", "quickstart", "--worker", "vllm"),
            "expected a server that runs, such as sglang=http://127.0.0.1:30000",
        ),
        (("run", "quickstart", "--worker", "vllm=http://a:1", "--engine", "local"), "expected --engine or --worker"),
        (("run", "quickstart", "--resume", "--out", "/nonexistent"), "not a run directory"),
        (("dance",), "No such command 'dance'"),
        (("serve", "--engine", "magic", "--tokenizer", "/nonexistent"), "tokenizer.json"),
        (("run", "quickstart", "--dry-run", "--resume"), "expected --dry-run or --resume, got both"),
        (("serve", "--host", "0.0.0.0", "--no-auth", "--engine", "scripted"), "admin token"),
        (("serve", "--admin-token", "t", "--no-auth", "--engine", "scripted"), "got both"),
        (("scenario", "check", "/nonexistent"), "/nonexistent"),
        (("agent", "doctor", "react_chat"), "a script without a profile"),
        (("run", "quickstart", "--server", "http://a:1", "--engine", "local"), "expected --server, or --engine, "),
        (("run", "quickstart", "--server", "http://u:hidden@127.0.0.1:1"), "a user or a secret"),
        (("model", "get", "nope"), "expected one of smollm2-135m-instruct"),
        (("engine", "up", "local", "--model", "nope"), "'nope' is neither a folder, nor a hub id"),
        (("engine", "up", "local", "--model", "."), "config.json"),
        (("engine", "up", "tgi"), "expected one of sglang, vllm, local"),
        (("engine", "up", "vllm", "--dtype", "int4"), "expected one of float32, bfloat16"),
        (("engine", "up", "vllm", "--env", "X"), "expected NAME=VALUE, got 'X'"),
        (("engine", "doctor", "127.0.0.1:30100"), "expected an address such as http://"),
        (("serve", "--engine", "scripted", "--matching", "foo:bar"), "No module named 'foo'"),
        (("doctor", "engine"), "expected harness doctor engine URL"),
        (("doctor", "agent"), "expected harness doctor agent NAME"),
        (("doctor", "agent", "codex", "--model", "qwen"), "expected --model with an engine server"),
        (("completion", "tcsh"), "'bash', 'zsh', 'fish'"),
        (("show", "/nonexistent"), "found nothing at /nonexistent"),
        (("audit", "/nonexistent"), "found no file /nonexistent"),
        (("audit", "."), "found no file run.db"),
        (("exec",), "-- COMMAND"),
        (("exec", "--agent", "codecs", "--", "true"), "did you mean 'codex'?"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_a_usage_error(tmp_path: Path, arguments: tuple[str, ...], words: str):
    """With exit code 4 (6 where a tokenizer cannot be read), nothing on standard output, no file and no secret."""
    ended = harness(*arguments, cwd=tmp_path)

    assert ended.code == (6 if "tokenizer.json" in words else 4), ended.stderr
    assert words in ended.stderr
    assert (ended.stderr.count("\n"), "hidden" in ended.stderr) == (1, False)
    assert (ended.stdout, [*tmp_path.iterdir()]) == ("", [])


def test_debugging_shows_where_it_was_raised():
    """HARNESS_DEBUG=1 adds the traceback, the line stays."""
    ended = harness("run", "quikstart", env={"HARNESS_DEBUG": "1"})

    assert "Traceback" in ended.stderr
    assert ended.stderr.splitlines()[-1].startswith("harness: quikstart")


def test_an_empty_suite_selects_nothing(tmp_path: Path):
    """Exit code 5, which is neither a failure nor a success."""
    ended = harness("run", tmp_path)

    assert ended.code == 5
    assert "no scenario" in ended.stderr


def test_an_error_is_json_when_json_was_asked_for():
    """So that a script reads one document whatever happens."""
    ended = harness("run", "quikstart", "--json")

    assert ended.document["exit_code"] == ended.code == 4
    assert ended.document["error"]["code"] == "scenario_error"


def test_scenarios_are_listed():
    """For readers and for programs."""
    names = sorted(path.parent.name for path in SCENARIOS.glob("*/scenario.toml"))
    assert {"length_limited", "long_session", "quickstart"} <= set(names)

    assert [line.split()[0] for line in harness("scenario", "list").stdout.splitlines()] == names
    listed = harness("scenario", "list", "--json").document["scenarios"]
    assert [scenario["name"] for scenario in listed] == names


def test_scenarios_are_checked(tmp_path: Path):
    """Right ones are named, wrong ones explained."""
    assert harness("scenario", "check", write_scenario(tmp_path / "good")).stdout == "good: ok (4 sessions)\n"
    ended = harness("scenario", "check", write_scenario(tmp_path / "bad", seed="x"))

    assert (ended.code, ended.stdout) == (4, "")
    assert "seed: expected a valid integer, got 'x'" in ended.stderr


@pytest.mark.parametrize("kind", ["scenario", "script", "profile"])
def test_a_schema_allows_the_files_that_are_shipped(kind: str):
    """Their keys, and no others."""
    schema = json.loads(harness("scenario", "schema", kind).stdout)
    if "$ref" in schema:
        schema = schema["$defs"][schema["$ref"].rpartition("/")[2]]
    folder = ROOT / "agents" if kind == "profile" else SCENARIOS
    files = [tomllib.loads(path.read_text()) for path in folder.glob(f"*/{kind}.toml")]

    assert files
    for file in files:
        assert {*schema.get("required", ())} <= file.keys() <= schema["properties"].keys()
    assert schema["additionalProperties"] is False
