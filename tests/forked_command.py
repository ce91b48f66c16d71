"""Has the process of `warm_harness` fork a command, and ends as it does: `forked_command.py ADDRESS ARGUMENT...`.

Nothing but the standard library is imported, and little of that: it runs once for each command of a page of the docs.
"""

import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

_LARGEST_REQUEST = 1 << 18


def run(address: str, request: list[Any], streams: list[int], timeout_s: float | None) -> tuple[int, float]:
    """Exit code and processor seconds of a command with its arguments, environment and directory."""
    body = json.dumps(request).encode()
    assert len(body) < _LARGEST_REQUEST
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asking:
        asking.connect(address)
        socket.send_fds(asking, [body], streams)
        asking.settimeout(timeout_s)
        pid = int(asking.recv(64))
        try:
            code, cpu_s = json.loads(asking.recv(64))
        except BaseException:
            os.killpg(pid, signal.SIGKILL)
            raise
        return code, cpu_s


def read_request(asking: socket.socket) -> tuple[list[Any], list[int]]:
    """What `run` has sent: the request, and output and errors of the command."""
    body, streams, *_ = socket.recv_fds(asking, _LARGEST_REQUEST, 2)
    return json.loads(body), streams


def answer_with_end(asking: socket.socket, pid: int) -> None:
    """Tell `run` of the process, and of its end."""
    asking.send(str(pid).encode())
    _, status, used = os.wait4(pid, 0)
    asking.send(json.dumps([os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime]).encode())


if __name__ == "__main__":
    sys.exit(run(sys.argv[1], [sys.argv[2:], dict(os.environ), str(Path.cwd())], [1, 2], None)[0])
