"""What podman and docker are told: a fake of both writes its command lines down."""

import asyncio
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from harness.errors import SandboxFailed
from harness.rollouts.sandboxes.container import ContainerSandbox
from harness.rollouts.sandboxes.sandbox import Place
from harness.rollouts.sandboxes.spec import SandboxSpec
from tests.session_servers.served import eventually

FAKE = """
import json, os, sys, time
with open({calls!r}, "a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
answers = json.load(open({answers!r}))
code, said = answers.get(sys.argv[1], (0, ""))
while sys.argv[1] == "start" and os.path.exists({calls!r} + "-wait"):
    time.sleep(0.01)
print(said, file=sys.stderr if code else sys.stdout)
with open({calls!r} + "-ended", "a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
sys.exit(code)
"""
SECRET = "a key; $(touch x)\nof two 'lines'"


class FakeEngine:
    """A program on PATH, its calls and its answers."""

    def __init__(self, folder: Path, name: str) -> None:
        self.calls, self._answers = folder / "calls", folder / "answers"
        self.answer({})
        program = folder / "bin" / name
        program.parent.mkdir()
        words = (sys.executable, "-IS", "-c", FAKE.format(calls=str(self.calls), answers=str(self._answers)))
        # Not a first line with this Python, whose path may have spaces.
        program.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n', encoding="utf-8")
        program.chmod(0o755)

    def answer(self, answers: dict[str, tuple[int, str]]) -> None:
        """Exit code and words of each subcommand, (0, "") by default."""
        self._answers.write_text(json.dumps(answers), encoding="utf-8")

    @property
    def ended(self) -> list[list[str]]:
        """Calls that were not killed."""
        return _calls_in(self.calls.with_name("calls-ended"))

    @property
    def heard(self) -> list[list[str]]:
        return _calls_in(self.calls)


def _calls_in(file: Path) -> list[list[str]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(name="engine", params=["docker", "podman"])
def _engine(request, tmp_path, monkeypatch):
    engine = FakeEngine(tmp_path, request.param)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    return engine


@pytest.fixture(name="place")
def _place(tmp_path):
    for name in ("work", "box/shown"):
        (tmp_path / name).mkdir(parents=True)
    return Place("harness-box-0-1-2-3", tmp_path / "work", tmp_path / "box" / "shown", (tmp_path / "agent.py",))


def box_of(engine: FakeEngine, place: Place, **table: object) -> ContainerSandbox:
    kind = next((engine.calls.parent / "bin").iterdir()).name
    return ContainerSandbox(SandboxSpec(kind=kind, image="registry/agent:1", **table), place)


async def test_a_box_has_every_limit_and_no_network(engine, place):
    """The whole command line, word by word."""
    limits = {"cpus": 1.5, "memory_mb": 512, "pids": 99, "user": "1000:100", "mounts": ["/data", "/out:/o:rw"]}
    await box_of(engine, place, **limits).start()
    words = engine.heard[0]
    volumes = [words[number + 1] for number, word in enumerate(words) if word == "--volume"]
    assert words[0] == "create"
    assert words[words.index("registry/agent:1") + 1 :][:2] == ["sh", "-c"]
    assert volumes == [
        f"{place.programs[0]}:{place.programs[0]}:ro",
        f"{place.folder}:{place.folder}:ro",
        "/data:/data:ro",
        "/out:/o:rw",
        f"{place.workdir}:{place.workdir}:rw",
    ]
    pairs = {" ".join(words[number : number + 2]) for number in range(len(words) - 1)}
    assert pairs >= {
        f"--name {place.name}",
        f"--label harness.sandbox={place.name}",
        f"--label harness.rollout={place.workdir}",
        "--network none",
        "--cap-drop all",
        "--security-opt no-new-privileges",
        "--user 1000:100",
        "--cpus 1.5",
        "--memory 512m",
        "--memory-swap 512m",
        "--pids-limit 99",
    }


async def test_no_command_line_shows_a_variable(engine, place):
    """They go by a file, whole, whatever is in them."""
    started = []

    async def on_host(command, env, workdir):
        started.append(command)
        return await asyncio.create_subprocess_exec("true")

    env = {"OPENAI_API_KEY": SECRET, "not a name": "dropped"}
    process = await box_of(engine, place).exec(("agent", "--go"), env=env, cwd=place.workdir, on_host=on_host)
    assert await process.wait() == 0
    assert SECRET not in json.dumps([engine.heard, started])
    assert started[0][-2:] == ("agent", "--go")
    file = place.folder / "variables.sh"
    show = f'. "{file}" && printf %s "$OPENAI_API_KEY"'
    shell = await asyncio.create_subprocess_exec("sh", "-c", show, stdout=asyncio.subprocess.PIPE)
    assert (await shell.communicate())[0].decode() == SECRET


async def test_a_workdir_is_the_users_of_the_image(engine, place):
    """Whoever that is, as deep as an agent nests folders, and without following its links."""
    outside = place.workdir.parent / "outside"
    outside.touch()
    (place.workdir / "link").symlink_to(outside)
    folder = os.open(place.workdir, os.O_RDONLY)
    for _ in range(1500):
        os.mkdir("folder", dir_fd=folder)
        above, folder = folder, os.open("folder", os.O_RDONLY, dir_fd=folder)
        os.close(above)
    os.close(folder)
    engine.answer({"exec": (0, "1234\n99")})
    box = box_of(engine, place, user="node")
    await box.start()
    await box.exec(("agent",), env={}, cwd=place.workdir, on_host=lambda *_: asyncio.sleep(0))
    subprocess.run(("rm", "-rf", place.workdir / "folder"), check=True)
    owners = [(path.lstat().st_uid, path.lstat().st_gid) for path in (place.workdir, place.workdir / "link", outside)]
    ours = (os.getuid(), os.getgid())
    assert owners == [ours if os.getuid() else (1234, 99)] * 2 + [ours]


async def test_a_box_whose_files_cannot_be_made_has_failed(engine, place):
    """The agent is not to blame for a full disk."""
    (place.folder / "variables.sh").mkdir()
    with pytest.raises(SandboxFailed, match="files of the sandbox cannot be made"):
        await box_of(engine, place).exec(("agent",), env={}, cwd=place.workdir, on_host=lambda *_: asyncio.sleep(0))


async def test_a_command_without_its_variables_or_directory_ends_like_a_failed_engine(engine, place):
    """With 125, and not with an exit code of the shell's."""
    started: list[list[str]] = []
    box = box_of(engine, place)
    await box.exec(
        ("true",), env={}, cwd=place.workdir, on_host=lambda *told: asyncio.sleep(0, started.append(list(told[0])))
    )
    entered = started[0][started[0].index("sh") :]
    for missing, code in {"variables.sh": 125, "work": 125, "true": 127, "none": 0}.items():
        told = ["/nowhere" if word.endswith(missing) else word for word in entered]
        inside = await asyncio.create_subprocess_exec(*told)
        assert await inside.wait() == code


async def test_files_are_copied_by_the_engine(engine, place):
    """In and out, with the name of the box."""
    box = box_of(engine, place)
    await box.put(Path("/here"), Path("/there"))
    await box.get(Path("/there"), Path("/here"))
    assert engine.heard == [["cp", "/here", f"{place.name}:/there"], ["cp", f"{place.name}:/there", "/here"]]


@pytest.mark.parametrize("said", ["Cannot connect to the Docker daemon", "no space left on device", "No such image"])
async def test_a_failure_of_the_engine_is_not_the_agents(engine, place, said):
    """Daemon away, disk full, image missing: the message is the engine's."""
    engine.answer({"create": (125, said)})
    with pytest.raises(SandboxFailed, match=f"exit code 125: {said}"):
        await box_of(engine, place).start()


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ({"exec": (0, "oom_kill_disable 0 under_oom 0 oom_kill 2")}, "memory limit of 64 MB"),
        ({"exec": (1, ""), "inspect": (0, "true")}, "memory limit of 64 MB"),
        ({"exec": (1, "not running"), "inspect": (0, "false")}, None),
        ({"exec": (0, "oom_kill 0"), "inspect": (1, "No such container")}, "container is gone: No such container"),
        ({"exec": (0, "oom_kill 0"), "inspect": (0, "false")}, None),
    ],
)
async def test_what_made_an_agent_fail_is_asked_of_the_box(engine, place, answers, expected):
    """Memory counts even if the container is running; an agent may end its container."""
    engine.answer(answers)
    failure = await box_of(engine, place, memory_mb=64).find_failure()
    assert failure is None if expected is None else expected in (failure or "")


async def test_a_box_that_is_gone_is_removed(engine, place):
    """Another failure of the removal is reported."""
    box = box_of(engine, place)
    engine.answer({"rm": (1, f"Error: No such container: {place.name}")})
    await box.stop()
    engine.answer({"rm": (1, "device or resource busy")})
    with pytest.raises(SandboxFailed, match="could not be removed: device or resource busy"):
        await box.stop()


async def test_a_start_is_not_cut_short(engine, place):
    """An engine that is killed in the middle of it has no record of a container that runs."""
    box = box_of(engine, place)
    waits = engine.calls.with_name("calls-wait")
    waits.touch()
    starting = asyncio.create_task(box.start())
    await eventually(lambda: engine.calls.exists() and len(engine.heard) == 2)
    starting.cancel()
    asyncio.get_running_loop().call_soon(waits.unlink)
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert [words[0] for words in engine.ended] == ["create", "start"]
