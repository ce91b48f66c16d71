"""Questions to an installation: whatever is broken is a finding, and nothing of them is left."""

import signal
import subprocess
import sys
import threading
import tomllib
from pathlib import Path

import pytest

from harness.cli.installation.packages import EXTRAS
from harness.cli.installation.probes import examine_proxy_of
from harness.cli.installation.probing import Scratch, ask_all
from harness.machine.findings import Finding, Level
from tests.checkout import ROOT


def test_a_probe_that_hangs_or_breaks_is_a_finding(tmp_path: Path):
    """The others are told all the same, and its folder is gone."""
    never, made = threading.Event(), threading.Event()

    def hang(scratch: Scratch) -> list[Finding]:
        (scratch.make(tmp_path) / "file").touch()
        made.set()
        never.wait()
        return []

    def wait_until_made(_: Scratch) -> list[Finding]:
        made.wait()
        return [Finding("fine", Level.OK, "as it should be")]

    def fall_over(_: Scratch) -> list[Finding]:
        raise OSError("no such device")

    found = ask_all({"hung": hang, "fine": wait_until_made, "broken": fall_over}, deadline_s=1.0)
    never.set()

    assert [(each.check, each.level) for each in found] == [("hung", "warn"), ("fine", "ok"), ("broken", "fail")]
    assert "no such device" in found[2].found
    assert list(tmp_path.iterdir()) == []


def test_a_probe_that_nobody_waits_for_makes_nothing_any_more(tmp_path: Path):
    """It may wake up after the end."""
    scratch = Scratch()
    scratch.remove()

    with pytest.raises(TimeoutError):
        scratch.make(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_nothing_behind(number: signal.Signals, tmp_path: Path):
    """While a probe is at work in its folder."""
    program = """
import sys, threading
from pathlib import Path
from harness.cli.installation.probing import ask_all
from harness.suite.run.interrupts import terminated_as_interrupted
def hang(scratch):
    (scratch.make(Path(sys.argv[1])) / "file").touch()
    print("made", flush=True)
    threading.Event().wait()
with terminated_as_interrupted():
    ask_all({"hung": hang}, 60)
"""
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "made\n"
        process.send_signal(number)
        _, said = process.communicate(timeout=60)

    assert "KeyboardInterrupt" in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("proxies", "level"),
    [
        ({}, "ok"),
        ({"https": "http://p:1"}, "ok"),
        ({"http": "http://p:1"}, "warn"),
        ({"all": "socks5://p:1"}, "warn"),
        ({"http": "http://p:1", "no": "localhost"}, "warn"),
        ({"http": "http://p:1", "no": "127.0.0.1,localhost"}, "ok"),
        ({"http": "http://p:1", "no": "*"}, "ok"),
    ],
)
def test_a_proxy_that_catches_loopback_is_told_of(proxies: dict[str, str], level: str):
    """By the rules of `NO_PROXY`."""
    assert examine_proxy_of(proxies).level == level


def test_a_proxys_password_is_not_told():
    """The doctor's words go into bug reports."""
    assert "secret" not in str(examine_proxy_of({"http": "http://me:secret@p:1"}))


def test_every_extra_has_a_purpose():
    """Less those for people who change the harness and its documentation."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]

    assert set(EXTRAS) == set(declared) - {"dev", "docs"}
