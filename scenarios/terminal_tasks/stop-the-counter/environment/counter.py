"""Counts ten times a second; SIGUSR1 writes the state, SIGTERM the end."""

import json
import os
import signal
import time
from pathlib import Path

HERE = Path(__file__).parent
count = 0


def write(name: str) -> None:
    state = {"pid": os.getpid(), "count": count, "sign": (os.getpid() * 7919 + count) % 99991}
    (HERE / name).write_text(json.dumps(state))


def end(*_: object) -> None:
    write("ended.json")
    raise SystemExit(0)


signal.signal(signal.SIGUSR1, lambda *_: write("state.json"))
signal.signal(signal.SIGTERM, end)
(HERE / "counter.pid").write_text(str(os.getpid()))
while True:
    time.sleep(0.1)
    count += 1
