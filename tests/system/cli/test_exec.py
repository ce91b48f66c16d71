"""`harness exec` and `harness env`: a session for a command line of one's own, on a server that runs."""

import asyncio
import json
import os
import select
import signal
import sys
import termios
from io import RawIOBase
from pathlib import Path

import pytest

from harness.rollouts.agents.profile import expand, literal
from tests.harness_command import Ended, harness, start_harness, wait
from tests.session_servers.served import says, serving

CALL = """
import json, os, pathlib, urllib.request
body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": "Hello."}]}).encode()
headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
print(json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"])
print("given", os.environ["HARNESS_INSTRUCTION"], "${LITERAL}")
"""


async def run(*arguments: object, cwd: Path | None = None) -> Ended:
    """How the command ended, while the loop of the server continues."""
    return await asyncio.to_thread(harness, *map(str, arguments), cwd=cwd, timeout_s=120)


async def test_a_command_line_has_a_session_of_its_own(tmp_path: Path) -> None:
    """Its record and its samples are printed, and the session is gone."""
    async with serving(*says("Good day.")) as client:
        command = ("--", sys.executable, "-c", CALL)
        ended = await run("exec", "--server", client.url, "--instruction", "Greet.", "--json", *command, cwd=tmp_path)
        left = (await client.http.get("/sessions")).json()

    assert ended.code == 0, ended.stderr
    document = json.loads(ended.stdout)
    assert document["outcome"]["kind"] == "finished"
    assert [turn["reply"]["content"] for turn in document["session"]["turns"]] == ["Good day."]
    assert [sample["metadata"]["turns"] for sample in document["samples"]] == [[0]]
    assert document["workdir"] == document["folder"]
    log = (tmp_path / document["folder"] / "agent.log").read_text()
    assert log.splitlines() == ["Good day.", "given Greet. ${LITERAL}"]
    assert document["session_id"] not in json.dumps(left)


async def test_the_output_of_a_command_is_shown_as_it_comes(tmp_path: Path) -> None:
    """While it runs, more than its log keeps, without its escape sequences; and why tokens were dropped."""
    program = f"{CALL.replace('print(', 'said = (')}\nfor n in range(2): urllib.request.urlopen(request).read()\n"
    program += (
        "print('\\x1b[2Jasked', flush=True)\nwhile not os.path.exists('seen'): pass\nprint('x' * 1_500_000 + 'end')"
    )
    (tmp_path / "mine").mkdir()
    async with serving(*says("One.", "Two.", "Three.")) as client:
        command = ("exec", "--server", client.url, "--workdir", "mine", "--selection", "one", "--")
        with start_harness(*command, sys.executable, "-c", program, cwd=tmp_path) as process:
            assert process.stderr is not None
            first = await asyncio.to_thread(process.stderr.readline)
            (tmp_path / "mine" / "seen").touch()
            ended = await asyncio.to_thread(wait, process)
        refused = await run(*command[:-2], "best", "--", "true", cwd=tmp_path)

    assert first == "\\x1b[2Jasked\n"
    assert ended.stderr == "x" * 1_500_000 + "end\n"
    assert "ledger: 17 generated, 7 trained, dropped: 10 resample" in ended.stdout
    assert "selection" in refused.stdout


async def test_settings_of_the_session_are_passed_on(tmp_path: Path) -> None:
    """Values in JSON or words; what the server does not know is refused with its name."""
    twice = f"{CALL}\nurllib.request.urlopen(request)"
    async with serving(*says("One.", "Two.")) as client:
        asked = ("exec", "--server", client.url, "--matching", "exact", "--session", "strays=refuse")
        limited = await run(*asked, "--session", 'limits={"turns": 1}', "--", sys.executable, "-c", twice, cwd=tmp_path)
        unknown = await run(*asked, "--session", "stray=1", "--", "true", cwd=tmp_path)
        unmatched = await run(*asked, "--matching", "loose", "--", "true", cwd=tmp_path)
        odd = await run(*asked, "--session", "strays", "--", "true", cwd=tmp_path)

    assert limited.stdout.startswith("limited: "), limited
    assert "`stray`" in unknown.stdout
    assert "'loose'" in unmatched.stdout
    assert odd.stderr == "harness: --session: expected KEY=VALUE, got 'strays'\n"


PLAYED = """
import os, signal, time
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGWINCH})
print(*os.get_terminal_size(), os.ttyname(0) == os.ttyname(2), flush=True)
signal.sigwait({signal.SIGWINCH})
print("resized", *os.get_terminal_size(), flush=True)
try:
    print("hello", input("name? "), flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


async def test_a_terminal_is_passed_through(tmp_path: Path) -> None:
    """Its size, keys, resize and Ctrl+C; without one the option is refused, and afterwards it is as it was."""
    ours, users = os.openpty()
    with os.fdopen(ours, "r+b", buffering=0) as screen, os.fdopen(users, "r+b", buffering=0) as terminal:
        termios.tcsetwinsize(users, (30, 100))
        before = termios.tcgetattr(users)
        async with serving(*says("Good day.")) as client:
            command = ("exec", "--server", client.url, "--interactive", "--", sys.executable, "-c", CALL + PLAYED)
            refused = await run(*command, cwd=tmp_path)
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "harness", *command),
                stdin=terminal,
                stdout=terminal,
                stderr=terminal,
                cwd=tmp_path,
                start_new_session=True,
                env={**os.environ, "HARNESS_INSTRUCTION": "Greet."},
            )
            shown = await asyncio.to_thread(_read_until, screen, b"100 30 True")
            termios.tcsetwinsize(users, (40, 120))
            process.send_signal(signal.SIGWINCH)  # the kernel's, if this terminal were the process's own
            shown += await asyncio.to_thread(_read_until, screen, b"name? ")
            screen.write(b"Ann\r")
            shown += await asyncio.to_thread(_read_until, screen, b"hello Ann")
            screen.write(b"\x03")
            shown += await asyncio.to_thread(_read_until, screen, b"ledger: ")
            code = await asyncio.wait_for(process.wait(), 30)
        after = termios.tcgetattr(users)

    lines = shown.decode().replace("\r", "").splitlines()
    assert lines[0] == "Good day."
    assert "100 30 True" in lines
    assert "resized 120 40" in lines
    assert "interrupted" in shown.decode()
    assert code == 0, shown.decode()
    assert after == before
    assert "--interactive: expected a terminal" in refused.stderr


def _read_until(screen: RawIOBase, words: bytes) -> bytes:
    shown = b""
    while words not in shown:
        assert select.select([screen], [], [], 60)[0], shown
        shown += screen.read(4096) or b""
    return shown


@pytest.mark.parametrize(("program", "code", "words"), [("pass", 1, "no_model_call"), (f"{CALL}\n1 / 0", 1, "crashed")])
async def test_a_command_that_fails_is_no_success(tmp_path: Path, program: str, code: int, words: str) -> None:
    """With the place of its log."""
    async with serving() as client:
        ended = await run("exec", "--server", client.url, "--", sys.executable, "-c", program, cwd=tmp_path)

    assert (ended.code, ended.stdout.split(":")[0]) == (code, words)
    [log] = tmp_path.glob("runs/exec-*/agent.log")
    assert f"its log is {log.relative_to(tmp_path)}" in ended.stdout


async def test_the_files_of_a_workdir_stay_as_they_are(tmp_path: Path) -> None:
    """A command works among the user's own files, under whatever names they go."""
    mine = tmp_path / "mine"
    (mine / ".home").mkdir(parents=True)
    names = ("instruction.md", "metadata.json", "request_kwargs.json", "result.json", "agent.log", ".home/kept")
    for name in names:
        (mine / name).write_text(name)
    program = (
        f"{CALL}\npathlib.Path('done').touch(); pathlib.Path(os.environ['HARNESS_RESULT_FILE']).write_text('{{}}')"
    )
    async with serving(*says("Good day.")) as client:
        asked = ("exec", "--server", client.url, "--workdir", ".", "--json")
        ended = await run(*asked, "--", sys.executable, "-c", program, cwd=mine)

    assert ended.code == 0, ended.stderr
    assert {name: (mine / name).read_text() for name in names} == {name: name for name in names}
    assert sorted(path.name for path in mine.iterdir()) == sorted({*names, ".home", "done", "runs"} - {".home/kept"})
    folder = mine / ended.document["folder"]
    assert "Good day." in (folder / "agent.log").read_text()
    assert (folder / "result.json").exists()


async def test_the_home_of_an_agent_is_not_in_the_workdir(tmp_path: Path) -> None:
    """One that is there is the user's."""
    (tmp_path / ".home").mkdir()
    (tmp_path / ".home" / "kept").touch()
    async with serving() as client:
        asked = ("exec", "--server", client.url, "--agent", "openai_agents", "--workdir", ".")
        ended = await run(*asked, "--", "/bin/sh", "-c", "echo $HOME", cwd=tmp_path)

    assert ended.stdout.startswith("no_model_call"), ended.stderr
    assert (tmp_path / ".home" / "kept").exists()
    [folder] = tmp_path.glob("runs/exec-*")
    assert (folder / "agent.log").read_text().strip() == str(folder / ".home")
    assert not (folder / ".home").exists()


async def test_a_command_without_a_session_is_not_run() -> None:
    """Where no server listens: one line."""
    refused = await run("exec", "--server", "http://127.0.0.1:9", "--", "true")

    assert (refused.code, refused.stderr.count("\n")) == (6, 1)


async def test_the_variables_of_a_session_are_printed() -> None:
    """Those of every dialect, for `eval`; the session is open until somebody ends it."""
    async with serving(*says("Hi.")) as client:
        printed = await run("env", "--server", client.url)
        document = json.loads((await run("env", "--server", client.url, "--json")).stdout)
        variables = document["variables"]
        answer = await client.http.post(
            f"{variables['OPENAI_BASE_URL']}/chat/completions",
            json={"model": "m", "messages": [{"role": "user", "content": "Hello."}]},
            headers={"authorization": f"Bearer {variables['OPENAI_API_KEY']}"},
        )

    names = [line.removeprefix("export ").partition("=")[0] for line in printed.stdout.splitlines()]
    assert {"OPENAI_BASE_URL", "OPENAI_API_KEY", "ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY"} <= {*names}
    assert variables["ANTHROPIC_BASE_URL"] + "/v1" == variables["OPENAI_BASE_URL"]
    assert variables["HARNESS_SESSION_ID"] == document["session_id"]
    assert answer.status_code == 200


async def test_an_agent_that_is_configured_by_files_needs_a_home(tmp_path: Path) -> None:
    """It is made, and the files in it know the session."""
    async with serving() as client:
        asked = ("env", "--agent", "codex", "--server", client.url)
        refused = await run(*asked)
        document = json.loads((await run(*asked, "--home", tmp_path / "home", "--json")).stdout)

    assert (refused.code, "--home DIR" in refused.stderr) == (4, True)
    assert document["variables"]["HOME"] == str(tmp_path / "home")
    assert document["variables"]["OPENAI_BASE_URL"] in (tmp_path / "home/.codex/config.toml").read_text()


@pytest.mark.parametrize("agent", [("--agent", "codex"), ()])
async def test_a_home_with_files_is_left_alone(tmp_path: Path, agent: tuple[str, ...]) -> None:
    """It may be anybody's; no session is made. An empty directory is taken, and is for nobody else then."""
    mine, empty = tmp_path / "mine", tmp_path / "empty"
    (mine / ".ssh").mkdir(parents=True)
    (mine / ".ssh" / "id").write_text("a key")
    empty.mkdir()
    async with serving() as client:
        asked = ("env", *agent, "--server", client.url, "--home")
        refused = await run(*asked, mine)
        at_a_file = await run(*asked, mine / ".ssh" / "id")
        left = (await client.http.get("/sessions")).json()
        taken = await run(*asked, empty)

    assert (refused.code, at_a_file.code, taken.code) == (4, 4, 0)
    assert f"{mine} exists and is not empty" in refused.stderr
    assert [path.relative_to(mine) for path in mine.rglob("*")] == [Path(".ssh"), Path(".ssh/id")]
    assert (mine / ".ssh" / "id").read_text() == "a key"
    assert left["sessions"] == []
    assert empty.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("text", ["plain", "${A}", "$${A}", "$$${A} $A ${", "a${A}b${B}"])
def test_a_command_line_of_ones_own_is_taken_as_it_is(text: str) -> None:
    """Whatever in it looks like a variable of a profile."""
    assert expand(literal(text), {}) == text
