"""Programs run to their end, such as uv and pip. None outlives the process that waits for it.

They get an allowlist of environment variables: building a package runs its code, so installers get no token of ours.
"""

import asyncio
import os
import shutil
import signal
import sys
from collections.abc import Mapping
from contextlib import AsyncExitStack, suppress
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, NamedTuple

from harness.errors import HarnessError, LaneError
from harness.machine.deadlines import to_the_end, within
from harness.machine.group_reaper import signal_group
from harness.machine.process_group import reap
from harness.machine.watchdog import Watchdog

_GRACE_S = 2.0


class Ended(NamedTuple):
    code: int
    output: str
    messages: str


async def run(
    *command: str,
    deadline_s: float | None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    ends_children: bool = False,
) -> Ended:
    """Run a program. `env` replaces the variables of an installer. Raises `LaneError` after `deadline_s`.

    `ends_children` kills what is left of its process group after success, too.
    """
    async with AsyncExitStack() as stack:
        watchdog = Watchdog()
        stack.push_async_callback(watchdog.close)
        # No pipes, which end with their last holder: daemons of the program inherit copies that uvloop leaves open.
        output = stack.enter_context(TemporaryFile())  # noqa: SIM115  # the stack closes it
        messages = stack.enter_context(TemporaryFile())  # noqa: SIM115
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=messages,
            env=for_installers(os.environ) if env is None else dict(env),  # uvloop takes no other mapping
            cwd=cwd,
            start_new_session=True,
        )
        watchdog.watch(process.pid)  # an orphaned installer would continue writing where the next one works
        try:
            async with asyncio.timeout(deadline_s):
                code = await process.wait()
        except TimeoutError:
            assert deadline_s is not None
            words = " ".join((Path(command[0]).name, *command[1:]))
            raise LaneError(
                f"`{words}` did not end within {deadline_s:g} s; see that the package index answers, and try again"
            ) from None
        finally:
            if process.returncode is None:
                await to_the_end(_end(process))
            elif ends_children:
                signal_group(process.pid, signal.SIGKILL)
                reap(process.pid)
            watchdog.forget(process.pid)
        return Ended(code, _text_of(output), _text_of(messages))


async def _end(process: asyncio.subprocess.Process) -> None:
    """Leave nothing of the program, its children included. It may bring its files into order first."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        await within(_GRACE_S, process.wait())
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


def _text_of(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


_TAIL_LINES = 25


def find_uv() -> str:
    """Return uv's program: its package's, or the one on PATH. Raises `LaneError`."""
    if find_spec("uv") is not None:
        import uv

        with suppress(FileNotFoundError):  # a package without its program
            return uv.find_uv_bin()
    program = shutil.which("uv")
    if program is None:
        raise LaneError("expected uv, which builds environments, found none: pip install 'session-harness[run]'")
    return program


def pip_command() -> list[str]:
    """Return a pip command for this interpreter: its own, or uv's."""
    if find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    return [find_uv(), "tool", "run", "--quiet", "--python", sys.executable, "pip"]


async def run_uv(*arguments: str, deadline_s: float | None, failure: type[HarnessError] = LaneError) -> str:
    """Return uv's output, stripped. Raises `failure`, or `LaneError` for a timeout."""
    return _require_success(arguments, await run(find_uv(), *arguments, deadline_s=deadline_s), failure)


async def try_uv(*arguments: str, deadline_s: float) -> Ended:
    return await run(find_uv(), *arguments, deadline_s=deadline_s)


def _require_success(arguments: tuple[str, ...], ended: Ended, failure: type[HarnessError]) -> str:
    if ended.code:
        tail = "\n".join(ended.messages.splitlines()[-_TAIL_LINES:])
        raise failure(
            f"`uv {' '.join(arguments)}` failed with exit code {ended.code}; mend what it names and try again:\n{tail}"
        )
    return ended.output.strip()


_PROGRAM_NAMES = frozenset(
    {
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TMPDIR", "TERM"),
        *("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME"),
        *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "NODE_EXTRA_CA_CERTS"),
        *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"),
    }
)
_INSTALLER_NAMES = frozenset(
    {
        *("NO_PROXY", "no_proxy", "NETRC", "SSH_AUTH_SOCK", "SSL_CLIENT_CERT", "NIX_SSL_CERT_FILE"),
        *("CC", "CXX", "CFLAGS", "CXXFLAGS", "CPPFLAGS", "LDFLAGS", "CPATH", "LIBRARY_PATH", "LD_LIBRARY_PATH"),
        *("PKG_CONFIG_PATH", "XDG_BIN_HOME", "XDG_CONFIG_DIRS"),
    }
)
_INSTALLER_PREFIXES = ("UV_", "PIP_", "npm_config_", "NPM_CONFIG_", "GIT_", "CARGO_", "RUSTUP_", "CMAKE_", "PYENV_")


def for_programs(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name in _PROGRAM_NAMES or name.startswith("LC_")}


def for_installers(environ: Mapping[str, str]) -> dict[str, str]:
    """Select the variables for installers, without `VIRTUAL_ENV`."""
    return for_programs(environ) | {
        name: value
        for name, value in environ.items()
        if name in _INSTALLER_NAMES or name.startswith(_INSTALLER_PREFIXES)
    }
