"""An agent and an environment for jobs of Harbor, by their import paths.

The agent is one that Harbor installs: a shell, in its environment, over the variables of the session. The environment
is bwrap on this machine, which starts sooner than containers.
"""

import asyncio
import shutil
from pathlib import Path
from typing import Any

from harbor.agents.installed.base import BaseInstalledAgent
from harbor.environments.base import BaseEnvironment, ExecResult

FOLDERS = ("app", "tests", "logs", "installed-agent", "root")
"""Folders of an environment that last between its commands."""

SHELL = """
import json, os, re, subprocess, sys, urllib.request

messages = [{"role": "user", "content": sys.argv[1]}]
while True:
    body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages}).encode()
    headers = {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    with urllib.request.urlopen(request) as answer:
        reply = json.load(answer)["choices"][0]["message"]
    found = re.search("```sh\\n(.*?)```", reply["content"], re.DOTALL)
    if found is None:
        break
    done = subprocess.run(["sh", "-c", found[1]], capture_output=True, text=True)
    messages += [reply, {"role": "user", "content": f"exit code {done.returncode}: {done.stdout}"}]
"""


class ShellAgent(BaseInstalledAgent):
    """An agent that runs the model's commands. `breaks` names what raises: `install`, or `logs`."""

    def __init__(self, *args: Any, breaks: str = "", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._breaks = breaks

    @staticmethod
    def name() -> str:
        """See Harbor."""
        return "shell"

    async def install(self, environment: BaseEnvironment) -> None:
        """Put the program into the environment."""
        if self._breaks == "install":
            raise RuntimeError("no such package")
        program = self.logs_dir / "shell.py"
        program.write_text(SHELL)
        await environment.upload_file(program, "/installed-agent/shell.py")

    async def run(self, instruction: str, environment: BaseEnvironment, context: Any) -> None:
        """Play; raises Harbor's error for an exit code, as its own agents do."""
        (self.logs_dir / "instruction.md").write_text(instruction)
        await environment.upload_file(self.logs_dir / "instruction.md", "/installed-agent/instruction.md")
        command = 'python3 /installed-agent/shell.py "$(cat /installed-agent/instruction.md)"'
        await self.exec_as_agent(environment, command)

    def populate_context_post_run(self, context: Any) -> None:
        """Tell that this was asked, after the logs had come."""
        if self._breaks == "logs":
            raise RuntimeError("no such log")
        context.metadata = {"agent": "was asked", "outcome": "of the agent"}


class BwrapEnvironment(BaseEnvironment):
    """Commands in bwrap, over folders of this machine."""

    @staticmethod
    def type() -> str:
        """See Harbor."""
        return "bwrap"

    def _validate_definition(self) -> None:
        return

    @property
    def _root(self) -> Path:
        return self.trial_paths.trial_dir / "root"

    async def start(self, force_build: bool) -> None:
        """Make the folders, as the tasks' Dockerfiles do."""
        for name in FOLDERS:
            (self._root / name).mkdir(parents=True)
        for name in ("agent", "verifier", "artifacts"):
            (self._root / "logs" / name).mkdir()
        shutil.copytree(self.environment_dir, self._root / "app", dirs_exist_ok=True)

    async def stop(self, delete: bool) -> None:
        """Delete the folders."""
        shutil.rmtree(self._root, ignore_errors=True)

    def _inside(self, path: str | Path) -> Path:
        return self._root / str(path).lstrip("/")

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        """See Harbor."""
        shutil.copy2(source_path, self._inside(target_path))

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        """See Harbor."""
        shutil.copytree(source_dir, self._inside(target_dir), dirs_exist_ok=True)

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        """See Harbor."""
        shutil.copy2(self._inside(source_path), target_path)

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        """See Harbor."""
        shutil.copytree(self._inside(source_dir), target_dir, dirs_exist_ok=True)

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        """See Harbor."""
        variables = {"PATH": "/usr/bin:/bin", "HOME": "/root", **(self._merge_env(env) or {})}
        system = ["--ro-bind", "/usr", "/usr", "--ro-bind", "/etc", "/etc"]
        links = [part for name in ("bin", "lib", "lib64") for part in ("--symlink", f"usr/{name}", f"/{name}")]
        folders = [part for name in FOLDERS for part in ("--bind", str(self._root / name), f"/{name}")]
        own = ["--unshare-pid", "--die-with-parent", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]
        process = await asyncio.create_subprocess_exec(
            *("bwrap", *system, *links, *folders, *own, "--chdir", cwd or "/app", "bash", "-c", command),
            env=variables,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(timeout_sec):
                told, failed = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()  # of bwrap, which ends all in its namespace
                await process.wait()
        return ExecResult(stdout=told.decode(), stderr=failed.decode(), return_code=process.returncode or 0)
