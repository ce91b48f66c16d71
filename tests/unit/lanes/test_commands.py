"""What a server is started with follows from the spec alone."""

from dataclasses import replace
from pathlib import Path

import pytest

from harness.lab.lanes import Dtype, LaneEngine, LaneSpec
from harness.lab.lanes.commands import ServerCommand, server_command

PARENT = {"PATH": "/bin", "PYTHONPATH": "/ours", "VIRTUAL_ENV": "/ours", "HF_HUB_OFFLINE": "0"}
GUARD = "HARNESS_REPEAT_TERMINATE_"


def command(spec: LaneSpec, parent: dict[str, str] | None = None) -> ServerCommand:
    return server_command(spec, 8100, Path("/env/bin/python"), [Path("/a"), Path("/b")], parent or PARENT)


def test_nothing_of_our_environment_is_imported_from(spec: LaneSpec) -> None:
    """`PATH` and the like pass, what leads to our packages does not."""
    environment = command(spec).environment

    assert (environment["PATH"], environment["PYTHONPATH"], "VIRTUAL_ENV" in environment) == ("/bin", "/a:/b", False)
    assert environment["HF_HUB_OFFLINE"] == "1"


def test_the_spec_has_the_last_word(spec: LaneSpec) -> None:
    """Variables and arguments of the spec come over those of the lane."""
    changed = replace(spec, env={"HF_HUB_OFFLINE": "2"}, arguments=("--dtype", "float64"))

    assert command(changed).environment["HF_HUB_OFFLINE"] == "2"
    assert command(changed).arguments[-2:] == ("--dtype", "float64")


def test_settings_of_the_repeat_guard_are_not_mixed(spec: LaneSpec) -> None:
    """One mapping travels: that of the spec, or that of the environment."""
    parent = {f"{GUARD}ENABLE": "1", f"{GUARD}CONFIG_JSON_PATH": "/x"}

    assert command(spec, parent).environment.items() >= parent.items()
    stated = command(replace(spec, env={f"{GUARD}ENABLE": "0"}), parent).environment
    assert {name: value for name, value in stated.items() if name.startswith(GUARD)} == {f"{GUARD}ENABLE": "0"}


@pytest.mark.parametrize(
    "flag", ["--host 127.0.0.1", "--port 8100", "--dtype bfloat16", "--served-model-name toy-model"]
)
def test_both_engines_listen_on_the_loopback_interface_only(spec: LaneSpec, flag: str) -> None:
    """And serve what they were asked for under the name of its folder."""
    assert flag in " ".join(command(replace(spec, dtype=Dtype.BFLOAT16)).arguments)


@pytest.mark.parametrize(
    ("engine", "flag"), [(LaneEngine.SGLANG, "--context-length"), (LaneEngine.VLLM, "--max-model-len")]
)
def test_a_context_is_never_longer_than_the_model_can(
    weights: Path, installed: Path, engine: LaneEngine, flag: str
) -> None:
    arguments = command(LaneSpec(engine, weights)).arguments

    assert arguments[arguments.index(flag) + 1] == "512"
