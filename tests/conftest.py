"""Fixtures of every test."""

import ctypes
import gc
import logging
import os
import resource
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import httpx
import pytest
from hypothesis import HealthCheck, Phase, settings

from harness.machine.log import ROOT
from tests.warm_harness import commands_cpu_s

pytest_plugins = (
    "tests.shallow_model",  # first, for others import from it
    "tests.installed_harness",
    "tests.local_model",
    "tests.processes.fixtures",
    "tests.real_engines",
    "tests.real_gateways",
    "tests.shared_lookups",
    "tests.workers",
)


# How long an example takes says how busy the machine is. To shrink one takes up to five minutes, the time limit of a
# test: where nobody watches, it stays as it was found.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("check", settings.get_profile("any machine"), max_examples=20)
settings.register_profile(
    "unwatched",
    settings.get_profile("any machine"),
    phases=[phase for phase in Phase if phase not in (Phase.shrink, Phase.explain)],
    print_blob=True,
)
settings.load_profile("unwatched" if os.environ.get("CI") else "any machine")

_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
_WORTH_A_TABLE_S = 60
_NOTEWORTHY_GB = 0.05
_OWN = "this process"
_MOST_GB = 3
"""What a test process may hold; servers that tests start are processes of their own."""


def pytest_configure(config: pytest.Config) -> None:
    """Programs that tests start heed Ctrl+C, also when the tests are a background job of a shell, which ignores it.

    Every tensor of a size that matters has pages of its own, which the system gets back with it: what models of one
    test after the other leave in glibc's arenas adds up to gigabytes otherwise.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, 1 << 20)
        libc.mallopt(_M_ARENA_MAX, 2)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Torch's threads spin while they wait for each other. With the other worker and its servers on the same cores a
    # forward pass then costs five times the processor time, and ten times the time.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Each client of httpx reads every certificate authority of the system, for 30 ms of processor time. Tests open a
    # thousand of them to servers on loopback, which have no certificate; they share what the first one has read.
    transports = httpx._transports.default
    transports.create_ssl_context = cache(transports.create_ssl_context)
    config.stash[_PEAKS] = {}
    config.stash[_CPU] = {}


class Peak(NamedTuple):
    """The most memory that a test process has held, in gigabytes, and the test by which it rose there."""

    gb: float = 0.0
    test: str = ""

    def after(self, test: str) -> "Peak":
        """The peak once `test` has ended."""
        unit = 1e9 if sys.platform == "darwin" else 1e9 / 1024
        gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
        return Peak(gb, test) if gb > self.gb + _NOTEWORTHY_GB else self


_PEAKS = pytest.StashKey[dict[str, Peak]]()


_CPU = pytest.StashKey[dict[str, float]]()


def _room_of(nodeid: str) -> str:
    return "/".join(nodeid.partition("::")[0].split("/")[1:-1])


def _cpu_s() -> float:
    """Processor time of this process, and of those that it has started and that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used) + commands_cpu_s()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """After every test: whether this process has held more memory than ever, and the processor time of its room."""
    before = _cpu_s()
    try:
        return (yield)
    finally:
        peaks = item.config.stash[_PEAKS]
        peaks[_OWN] = peaks.get(_OWN, Peak()).after(item.nodeid)
        cpu, room = item.config.stash[_CPU], _room_of(item.nodeid)
        cpu[room] = cpu.get(room, 0.0) + _cpu_s() - before


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker of xdist tells its peak, and its processor time."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["cpu"] = session.config.stash[_CPU]
        if peak := session.config.stash[_PEAKS].get(_OWN):
            session.config.workeroutput["peak"] = tuple(peak)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """What a worker has told; one that was killed tells nothing."""
    told = getattr(node, "workeroutput", {})
    cpu = node.config.stash[_CPU]
    for room, spent in told.get("cpu", {}).items():
        cpu[room] = cpu.get(room, 0.0) + spent
    if peak := told.get("peak"):
        node.config.stash[_PEAKS][node.gateway.id] = Peak(*peak)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keep what is imported and collected out of sight of the garbage collector."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what asks for the real model or for a browser, whatever else it says of itself."""
    for item in items:
        for fixture, mark in (("model_dir", "model"), ("browser", "browser")):
            if fixture in getattr(item, "fixturenames", ()):
                item.add_marker(mark)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Where the time went, by room: seconds of all workers together, set-up and teardown included.

    Processor time is that of the workers and of the processes that they ended; engines that tests share are not in it.
    """
    seconds, tests = Counter[str](), Counter[str]()
    for report in (each for reports in terminalreporter.stats.values() for each in reports):
        if isinstance(report, pytest.TestReport):
            room = _room_of(report.nodeid)
            seconds[room] += report.duration
            tests[room] += report.when == "call"
    if sum(seconds.values()) > _WORTH_A_TABLE_S:
        terminalreporter.section("seconds, processor seconds and tests by room")
        cpu = terminalreporter.config.stash[_CPU]
        for room, spent in seconds.most_common():
            terminalreporter.write_line(f"{spent:8.0f} {cpu.get(room, 0.0):8.0f} {tests[room]:6} {room}")
        terminalreporter.section(f"most memory of a test process, of {_MOST_GB} GB it may have")
        for process, peak in sorted(terminalreporter.config.stash[_PEAKS].items()):
            terminalreporter.write_line(f"{peak.gb:8.2f} GB of {process}, by {peak.test}", red=peak.gb > _MOST_GB)


@pytest.fixture(scope="module", autouse=True)
def _memory_given_back() -> Iterator[None]:
    """What models and tokenizers of a module held goes back to the system: the allocator keeps gigabytes otherwise."""
    yield
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)


@pytest.fixture(autouse=True)
def _logs_as_before() -> Iterator[None]:
    """A command that a test calls in its own process sets up the log; the tests behind it want theirs."""
    logger = logging.getLogger(ROOT)
    before = logger.handlers[:], logger.level, logger.propagate
    yield
    logger.handlers[:], logger.propagate = before[0], before[2]
    logger.setLevel(before[1])


@pytest.fixture(name="quiet_logs")
def _quiet_logs() -> None:
    """State machines do in a second what a server does in a day: nobody reads its log."""
    logging.getLogger(ROOT).setLevel(logging.CRITICAL + 1)
