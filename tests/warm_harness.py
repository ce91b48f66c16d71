"""The `harness` command, forked from a process that has imported it: a start costs a second of the processor otherwise.

The command has a session, a directory, an environment and streams of its own, as `python -m harness` has; it ends as
any interpreter ends. Where the environment decides what an import does, the command is started anew.
"""

import atexit
import gc
import json
import os
import runpy
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
_LARGEST_REQUEST = 1 << 18


class WarmHarness:
    """The process that commands are forked from; it ends with the one that has started it."""

    def __init__(self) -> None:
        self.cpu_s = 0.0
        """Processor time of all commands that have ended."""
        self._environment = dict(os.environ)
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-m", "tests.warm_harness", str(theirs.fileno())]
            quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
            self._process = subprocess.Popen(command, cwd=ROOT, pass_fds=[theirs.fileno()], **quiet)
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
        answers, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with answers, tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
            with theirs:
                request = json.dumps([list(arguments), dict(environment), str(directory)]).encode()
                assert len(request) < _LARGEST_REQUEST
                streams = [theirs.fileno(), output.fileno(), errors.fileno()]
                socket.send_fds(self._requests, [request], streams)
            answers.settimeout(timeout_s)
            pid = int(answers.recv(64))
            try:
                code, cpu_s = json.loads(answers.recv(64))
            except BaseException:
                os.killpg(pid, signal.SIGKILL)
                raise
            self.cpu_s += cpu_s
            output.seek(0)
            errors.seek(0)
            return code, output.read().decode(), errors.read().decode()

    def _end(self) -> None:
        self._requests.close()
        self._process.wait()


@cache
def warm_harness() -> WarmHarness:
    """The one of this process."""
    return WarmHarness()


def commands_cpu_s() -> float:
    """Processor time of the commands that this process has had forked."""
    return warm_harness().cpu_s if warm_harness.cache_info().currsize else 0.0


def _serve(requests: socket.socket) -> None:
    """Fork a watcher for each request; in the process of a command, return."""
    for name in _IMPORTED:
        import_module(name)
    gc.freeze()  # pages that no collection writes to are shared
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # watchers answer for themselves
    while True:
        request, streams, *_ = socket.recv_fds(requests, _LARGEST_REQUEST, 3)
        if not request:
            sys.exit()
        if not os.fork():
            requests.close()
            _watch(*json.loads(request), *streams)
            return
        for stream in streams:
            os.close(stream)


def _watch(arguments: list[str], environment: dict[str, str], directory: str, *streams: int) -> None:
    """Fork the command and answer with its end; return in the process of the command."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    answers, output, errors = streams
    if pid := os.fork():
        with socket.socket(fileno=answers) as socket_:
            socket_.send(str(pid).encode())
            _, status, used = os.wait4(pid, 0)
            socket_.send(json.dumps([os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime]).encode())
            os._exit(0)
    os.setsid()
    os.chdir(directory)
    for stream, number in ((output, 1), (errors, 2)):
        os.dup2(stream, number)
    for stream in streams:
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
