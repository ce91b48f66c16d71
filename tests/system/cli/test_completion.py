"""Shells complete commands and options."""

import subprocess

import pytest

from tests.harness_command import harness
from tests.shown_blocks import commands_on_path

IN_BASH = r"""
eval "$(harness completion bash)"
registered=$(complete -p harness)
function=${registered##*-F }
complete_words() {
    COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
    "${function% harness}" harness
    echo "${COMPREPLY[@]}"
}
complete_words harness ru
complete_words harness ctl ""
complete_words harness serve --st
complete_words harness completion z
complete_words harness run ./
"""


def test_bash_completes_commands_and_options():
    """As it does itself when somebody presses the key; where we know nothing, it continues with files."""
    done = subprocess.run(
        ["bash", "--norc", "-euc", IN_BASH], env=commands_on_path(), capture_output=True, text=True, check=False
    )

    assert (done.returncode, done.stderr) == (0, "")
    run, ctl, serve, shell, files = done.stdout.split("\n")[:5]
    assert run == "run"
    assert sorted(ctl.split()) == ["drain", "pause", "resume", "status", "top"]
    assert serve.split() == ["--store", "--stop-grace", "--streaming", "--strict"]
    assert (shell, files) == ("zsh", "")


@pytest.mark.parametrize(
    ("shell", "asked"),
    [
        ("zsh", {"_TYPER_COMPLETE_ARGS": "harness ru"}),
        ("fish", {"_TYPER_COMPLETE_ARGS": "harness ru", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}),
    ],
)
def test_what_zsh_and_fish_ask_is_answered(shell: str, asked: dict[str, str]):
    """By the words of their scripts."""
    script = harness("completion", shell)
    answer = harness(env=asked | {"_HARNESS_COMPLETE": f"complete_{shell}"})

    assert all(name in script.stdout for name in (*asked, "_HARNESS_COMPLETE", f"complete_{shell}"))
    assert "run" in answer.stdout
    assert "router" not in answer.stdout
    assert (script.code, script.stderr, answer.code) == (0, "", 0)
