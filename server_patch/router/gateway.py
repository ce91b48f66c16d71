"""The gateway behind the router: `smg`, as a child or already running, or the older `sglang-router`.

A child dies with us. `sglang-router` is restricted: it rewrites requests and knows no control verbs.
"""

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType

import aiohttp

from server_patch.background import running
from server_patch.router.fan_out import answer_of

log = logging.getLogger(f"harness.{__name__}")

_PARENT_PROGRAM = Path(__file__).with_name("end_with_parent.py")
_ATTEMPTS = 3  # at a pair of ports that is free
_PORT_TAKEN = "Address already in use"
_LOOPBACK = "127.0.0.1"

LOG_BYTES = 16 << 20
"""Size at which a gateway's log is rotated."""
_POLL_S = 0.1
_TAIL_BYTES = 2000
_START_S = 60.0
_STOP_S = 10.0
_PROBE_S = 10.0


class GatewayError(Exception):
    """Failure to start or reach a gateway."""


class GatewayKind(StrEnum):
    SMG = "smg"
    """Passes bodies on verbatim."""
    SGLANG_ROUTER = "sglang-router"
    """Rewrites bodies."""


RESTRICTIONS = {
    GatewayKind.SMG: (),
    GatewayKind.SGLANG_ROUTER: (
        "drops fields it does not know, among them input_ids and return_token_ids of chats, custom_params of /generate",
        "refuses token ids as the prompt of /v1/completions",
        "sends a POST up to five times unless it was started with --disable-retries --disable-circuit-breaker",
    ),
}
"""Restrictions for clients of a gateway. Sessions bypass it."""


@dataclass(frozen=True, slots=True)
class Gateway:
    url: str
    kind: GatewayKind

    @property
    def restrictions(self) -> tuple[str, ...]:
        return RESTRICTIONS[self.kind]


async def attach(http: aiohttp.ClientSession, url: str) -> Gateway:
    """Probe the gateway at `url`. Raises `GatewayError`."""
    url = url.rstrip("/")
    listed = await answer_of(http, f"{url}/workers")
    if not isinstance(listed, dict) or "workers" not in listed:
        raise GatewayError(
            f"expected a gateway at {url}, but GET /workers lists no workers there; give the address of"
            " smg or sglang-router, or let one be started with --worker-urls"
        )
    kind = GatewayKind.SMG if await _knows_smg_errors(http, url) else GatewayKind.SGLANG_ROUTER
    if RESTRICTIONS[kind]:
        about = {"gateway": url, "kind": str(kind), "restrictions": RESTRICTIONS[kind]}
        log.warning("gateway_is_restricted", extra=about)
    return Gateway(url, kind)


async def _knows_smg_errors(http: aiohttp.ClientSession, url: str) -> bool:
    # smg names its errors in a header; sglang-router answers an unknown path with nothing at all.
    try:
        async with asyncio.timeout(_PROBE_S), http.get(f"{url}/harness/no/such/route") as answer:
            return "x-smg-error-code" in answer.headers
    except (aiohttp.ClientError, OSError, TimeoutError):
        return False


@asynccontextmanager
async def launch(
    http: aiohttp.ClientSession,
    program: Path,
    kind: GatewayKind,
    worker_urls: Sequence[str],
    *,
    log_file: Path,
    log_bytes: int = LOG_BYTES,
    arguments: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    keys: Mapping[str, str] = MappingProxyType({}),
) -> AsyncIterator[Gateway]:
    """Run a gateway of our own on loopback while the block runs.

    `keys` of workers, by URL, appear on no command line. `log_file` becomes `LOG_FILE.1` at `log_bytes`. Raises
    `GatewayError` if it does not answer in time; workers may come later.
    """
    without_key = [url for url in worker_urls if not keys.get(url)]
    async with AsyncExitStack() as stack:
        for attempts_left in reversed(range(_ATTEMPTS)):
            port, metrics_port = _free_ports(2)
            said_before = _size_of(log_file)
            command = [str(program), *_command_line(kind, without_key, port, metrics_port), *arguments]
            url = f"http://{_LOOPBACK}:{port}"
            child = await stack.enter_async_context(_leashed(command, log_file, log_bytes, env))
            try:
                await _answers(http, url, child, log_file)
                break
            except GatewayError:
                if not attempts_left or _PORT_TAKEN not in _tail(log_file, said_before):
                    raise
                await stack.aclose()  # another process took a port between the choice and its use
        for worker in (each for each in worker_urls if each not in without_key):
            await _add(http, url, {"url": worker, "api_key": keys[worker]})
        log.info("gateway_started", extra={"gateway": url, "kind": str(kind), "log": str(log_file)})
        async with running(_say_if_it_ends(child, url, log_file)):
            yield await attach(http, url)


def _command_line(kind: GatewayKind, worker_urls: Sequence[str], port: int, metrics_port: int) -> list[str]:
    return [
        "launch",
        *("--host", _LOOPBACK, "--port", str(port)),
        *("--prometheus-host", _LOOPBACK, "--prometheus-port", str(metrics_port)),
        # A generation is requested once, and a sticky session stays.
        *("--disable-retries", "--disable-circuit-breaker"),
        # Not /health: on SGLang it generates a token, which a paused engine cannot do.
        *("--health-check-endpoint", "/v1/models", "--health-check-interval-secs", "5"),
        *("--worker-startup-check-interval", "1"),
        *("--log-level", "warn"),
        *_OWN_ARGUMENTS[kind],
        *(("--worker-urls", *worker_urls) if worker_urls else ()),
    ]


_OWN_ARGUMENTS = {
    # Without the last one a queue at one worker sends its sticky sessions to another.
    GatewayKind.SMG: ("--policy", "consistent_hashing", "--enable-rl", "--disable-worker-overload-protection"),
    GatewayKind.SGLANG_ROUTER: ("--policy", "manual"),
}


@asynccontextmanager
async def _leashed(
    command: Sequence[str], log_file: Path, log_bytes: int, env: Mapping[str, str] | None
) -> AsyncIterator[asyncio.subprocess.Process]:
    try:
        output = log_file.open("ab")
    except OSError as error:
        raise GatewayError(f"cannot write the gateway's log {log_file}: {error.strerror}") from error
    with output:
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", str(_PARENT_PROGRAM), str(log_file), str(log_bytes), *command),
            stdin=asyncio.subprocess.PIPE,
            stdout=output,  # of the program that ends with its parent
            stderr=output,
            env=env,
            start_new_session=True,
        )
    try:
        yield child
    finally:
        await _end(child)


async def _end(child: asyncio.subprocess.Process) -> None:
    assert child.stdin is not None
    child.stdin.close()  # its parent program ends the group; what ignores that is killed below
    try:
        async with asyncio.timeout(_STOP_S):
            await child.wait()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        await child.wait()


async def _answers(http: aiohttp.ClientSession, url: str, child: asyncio.subprocess.Process, log_file: Path) -> None:
    try:
        async with asyncio.timeout(_START_S):
            while await answer_of(http, f"{url}/workers") is None:
                if child.returncode is not None:
                    raise GatewayError(f"the gateway ended with exit code {child.returncode}: {_tail(log_file)}")
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        raise GatewayError(f"the gateway did not answer within {_START_S:g} s: {_tail(log_file)}") from None


async def _add(http: aiohttp.ClientSession, url: str, worker: Mapping[str, str]) -> None:
    try:
        async with asyncio.timeout(_PROBE_S), http.post(f"{url}/workers", json=worker) as answer:
            if answer.ok:
                return
            said = f"it answered {answer.status}"
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        said = f"{type(error).__name__} {error}"
    raise GatewayError(f"the gateway at {url} does not take the worker {worker['url']}: {said}")


async def _say_if_it_ends(child: asyncio.subprocess.Process, url: str, log_file: Path) -> None:
    # Sessions continue without a gateway; clients of the gateway do not.
    code = await child.wait()
    log.error("gateway_ended", extra={"gateway": url, "exit_code": code, "said": _tail(log_file)})


def _size_of(log_file: Path) -> int:
    return log_file.stat().st_size if log_file.exists() else 0


def _tail(log_file: Path, since: int = 0) -> str:
    with log_file.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(since if since <= size else 0, size - _TAIL_BYTES))  # smaller: rotated since then
        said = file.read(_TAIL_BYTES).decode("utf-8", errors="replace").strip()
    return said or f"it printed nothing; its log is {log_file}"


def _free_ports(count: int) -> list[int]:
    # All are bound until all are chosen, so they differ.
    listeners = [socket.create_server((_LOOPBACK, 0)) for _ in range(count)]
    try:
        return [listener.getsockname()[1] for listener in listeners]
    finally:
        for listener in listeners:
            listener.close()
