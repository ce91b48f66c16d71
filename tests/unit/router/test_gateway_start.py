"""A gateway whose port is taken in the moment of its start is started again, and any other failure is said at once."""

import shlex
from pathlib import Path

import pytest

from server_patch.router.app import open_http
from server_patch.router.gateway import GatewayError, GatewayKind, launch

TAKEN = "Address already in use (os error 98)"


def failing_program(directory: Path, said: str) -> Path:
    """A program that notes its start, says something, and fails."""
    program = directory / "gateway"
    starts = shlex.quote(str(directory / "starts"))
    program.write_text(f"#!/bin/sh\nprintf x >> {starts}\necho {shlex.quote(said)} >&2\nexit 1\n")
    program.chmod(0o755)
    return program


async def start(directory: Path, said: str) -> int:
    """How often the program is started until its failure is said."""
    program = failing_program(directory, said)
    async with open_http() as http:
        with pytest.raises(GatewayError, match="exit code 1"):
            async with launch(http, program, GatewayKind.SMG, [], log_file=directory / "log"):
                pytest.fail("it answers")
    return len((directory / "starts").read_text())


async def test_a_port_that_is_taken_is_no_reason_to_give_up(tmp_path: Path) -> None:
    assert await start(tmp_path, TAKEN) == 3


async def test_the_log_of_an_earlier_gateway_says_nothing_about_this_one(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(f"{TAKEN}\n")

    assert await start(tmp_path, "no such policy") == 1
