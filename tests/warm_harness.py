"""The `harness` command, forked from a process that has imported it: a start costs a second of the processor otherwise.

The command has a session, a directory, an environment and streams of its own, as `python -m harness` has; it ends as
any interpreter ends. Where the environment decides what an import does, the command is restarted.
"""

import atexit
import gc
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp

from tests import forked_command
from tests.checkout import ROOT

_IMPORTED = (
    *("harness.cli.main", "harness.cli.demo", "harness.cli.runs.summary", "harness.cli.runs.progress"),
    *("harness.suite.run.runner", "harness.suite.run.open_run", "harness.suite.run.services"),
    *("harness.server.serving", "harness.server.store.sqlite", "harness.rollouts.manager", "harness.viewer.terminal"),
    *("harness.engines.connect", "harness.engines.scripted", "harness.tokens.model_family"),
    *("jinja2.sandbox", "uvicorn", "uvloop"),
)
"""What most commands use; nothing of it starts a thread."""

_READ_WHEN_CALLED = ("HARNESS_", "OTEL_", "TMPDIR", "PYTEST_CURRENT_TEST")


class WarmHarness:
    """The process that commands are forked from; it ends with the one that has started it."""

    def __init__(self) -> None:
        self.cpu_s = 0.0
        """Processor time of the commands that were run here."""
        self._environment = dict(os.environ)
        self._folder = Path(mkdtemp(prefix="warm-"))
        self.address = str(self._folder / "socket")
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(self.address)
            listener.listen(64)
            command = [sys.executable, "-m", "tests.warm_harness", str(listener.fileno())]
            streams = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL}
            self._process = subprocess.Popen(command, cwd=ROOT, pass_fds=[listener.fileno()], **streams)
        atexit.register(self._end)

    def suits(self, environment: Mapping[str, str]) -> bool:
        """Whether what was imported here is what a command in `environment` would import."""
        names = environment.keys() | self._environment.keys()
        changed = [name for name in names if environment.get(name) != self._environment.get(name)]
        return all(name.startswith(_READ_WHEN_CALLED) for name in changed)

    def run(
        self, arguments: Sequence[str], environment: Mapping[str, str], directory: Path, timeout_s: float
    ) -> tuple[int, str, str]:
        """Exit code, output and errors of one command; one that does not end is killed with its group."""
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
            streams = [output.fileno(), errors.fileno()]
            request = [list(arguments), dict(environment), str(directory)]
            code, cpu_s = forked_command.run(self.address, request, streams, timeout_s)
            self.cpu_s += cpu_s
            output.seek(0)
            errors.seek(0)
            return code, output.read().decode(), errors.read().decode()

    def write_program(self, path: Path) -> None:
        """Write a `harness` that has commands forked, but for servers, which a shell ends by their process."""
        forked = f'"{sys.executable}" -I -S "{forked_command.__file__}" "{self.address}"'
        started = f'"{sys.executable}" -m harness'
        path.write_text(f'#!/bin/sh\ncase " $* " in\n" serve "*|*" --server "*) exec {started} "$@" ;;\n')
        with path.open("a") as program:
            program.write(f'*) exec {forked} "$@" ;;\nesac\n')
        path.chmod(0o755)

    def _end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        rmtree(self._folder)


@cache
def warm_harness() -> WarmHarness:
    """The one of this process."""
    return WarmHarness()


def commands_cpu_s() -> float:
    """Processor time of the commands that this process has run by it."""
    return warm_harness().cpu_s if warm_harness.cache_info().currsize else 0.0


def _serve(listener: socket.socket) -> None:
    """Fork a watcher for each request; in the process of a command, return."""
    for name in _IMPORTED:
        import_module(name)
    gc.freeze()  # pages that no collection writes to are shared
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # watchers answer for themselves
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [])
        if sys.stdin in ready:  # whoever has started this has ended
            sys.exit()
        asking, _ = listener.accept()
        if not os.fork():
            listener.close()
            _watch(asking)
            return
        asking.close()


def _watch(asking: socket.socket) -> None:
    """Fork the command and answer with its end; return in the process of the command."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    (arguments, environment, directory), streams = forked_command.read_request(asking)
    if pid := os.fork():
        forked_command.answer_with_end(asking, pid)
        os._exit(0)
    asking.close()
    os.setsid()
    os.chdir(directory)
    for number, stream in enumerate([os.open(os.devnull, os.O_RDONLY), *streams]):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None
    time.tzset()
    sys.argv[1:] = arguments
    sys.path[0] = directory  # as `python -m` has it


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
    runpy.run_module("harness", run_name="__main__", alter_sys=True)
