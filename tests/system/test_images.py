"""The images of `deploy/`: built without a network, and started as `compose.yaml` starts them."""

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pip
import pytest
import yaml
from typer.main import get_command

from deploy.clean_environments import MEGABYTE
from harness.cli.main import app
from harness.lab.models.tokenizer_files import write_small_tokenizer
from harness.server.settings import ServerSettings
from tests.checkout import ROOT
from tests.fake_engines.workers import worker_processes
from tests.free_ports import free_ports
from tests.sandbox_programs import builds_images, configure_podman, podman_image, require_program

DEPLOY = ROOT / "deploy"
START_S = 60.0
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))["services"]


def podman(*arguments: str | Path) -> str:
    done = subprocess.run(("podman", *arguments), capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


@pytest.fixture(name="build")
def _build(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], str]]:
    """Builds a target without a network, on a base of this machine's files, and returns the image's name."""
    require_program("podman")
    configure_podman(tmp_path, monkeypatch)
    context, tag = tmp_path / "context", uuid4().hex[:12]
    smg = re.findall(r"smg==\S+", (DEPLOY / "Dockerfile").read_text("utf-8"))
    download = (sys.executable, "-m", "pip", "download", "--quiet", "--dest", context / "wheels")
    subprocess.run((*download, wheel, "aiohttp", "setuptools", *smg), check=True, timeout=280)
    shutil.copy(wheel, context)
    shutil.copytree(Path(pip.__file__).parent, context / "pip")
    (context / "Dockerfile").write_text(f"FROM {podman_image()}\nENV PYTHONPATH=/pip\nCOPY pip /pip/pip\n")
    names = [f"localhost/harness-builder:{tag}"]
    podman("build", "--quiet", "--network", "none", "--tag", names[0], context)

    def build(target: str) -> str:
        names.append(f"localhost/harness-{target}:{tag}")
        podman(
            *("build", "--quiet", "--network", "none", "--format", "docker", "--layers=false"),
            *("--tag", names[-1], "--target", target),
            *("--build-arg", f"BUILDER={names[0]}", "--build-arg", f"BASE={podman_image()}"),
            *("--build-arg", "PIP_ARGS=--no-index --find-links /dist/wheels"),
            *("--file", DEPLOY / "Dockerfile", context),
        )
        return names[-1]

    yield build
    podman("image", "rm", "--force", *names)


@builds_images
@pytest.mark.timeout(600)  # two builds
async def test_the_images_start_as_compose_starts_them(build: Callable[[str], str], tmp_path: Path) -> None:
    """Gateway, router and page, without privileges, on a read-only root: a turn goes through, and SIGTERM ends them."""
    write_small_tokenizer(tmp_path / "store" / "tokenizer")
    for place in (tmp_path / "store", tmp_path / "store" / "tokenizer"):
        os.chown(place, 10001, 10001)
    gateway, server = build("gateway"), build("server")
    at, volume = free_ports(), f"{tmp_path / 'store'}:/store"
    given = {"HARNESS_ADMIN_TOKEN": "t0ken", "HARNESS_TOKENIZER": "/store/tokenizer", "HARNESS_PUBLIC_URL": ""}
    given["HARNESS_ROUTER_URL"] = f"http://127.0.0.1:{at}"
    async with AsyncExitStack() as stack:
        worker = await (await stack.enter_async_context(worker_processes())).start()
        start = partial(started, stack, given)
        start("gateway", gateway, "--host=127.0.0.1", f"--port={at}", f"--worker-urls={worker.url}")
        router = start("router", server, "--json", volume=volume)
        url = await asyncio.to_thread(announced, router)
        page = start("page", server, f"--server={url}", "--port=0", "--json")
        shown = await asyncio.to_thread(announced, page)
        async with httpx.AsyncClient(timeout=60) as http:
            asked = await http.post(f"{url}/sessions", json={}, headers={"authorization": "Bearer t0ken"})
            key = {"authorization": f"Bearer {asked.json()['api_key']}"}
            body = {"model": "any", "messages": [{"role": "user", "content": "Begin."}]}
            turn = await http.post(f"{url}/v1/chat/completions", json=body, headers=key)
            assert turn.status_code == 200, turn.text
            assert "harness view" in (await http.get(shown)).text
            assert (await http.get(f"{url}/router/health")).status_code == 200
        for container in (page, router):
            await asyncio.to_thread(podman, "stop", "--time", "30", container)
            assert json.loads(podman("inspect", container))[0]["State"]["ExitCode"] == 0, podman("logs", container)
    described = json.loads(podman("image", "inspect", server))[0]
    assert (described["Config"]["User"], described["Config"]["StopSignal"]) == ("10001:10001", "SIGTERM")
    assert described["Healthcheck"]["Test"][0] == "CMD"
    assert described["Size"] / MEGABYTE <= 250
    assert (tmp_path / "store" / "sessions.db").is_file()


def started(
    stack: AsyncExitStack, given: dict[str, str], name: str, image: str, *options: str, volume: str = ""
) -> str:
    """Start a service of compose.yaml, with `options` and variables `given` in the place of its own."""
    service = COMPOSE[name]
    replaced = {each.partition("=")[0] for each in options}
    own = [each for each in service["command"] if each.partition("=")[0] not in replaced]
    container = podman(
        *("run", "--detach", "--read-only", "--network", "host"),
        *(f"--tmpfs={each}" for each in service["tmpfs"]),
        *(f"--cap-drop={each}" for each in service["cap_drop"]),
        *(f"--security-opt={each}" for each in service.get("security_opt", ())),
        *("--env=HARNESS_HOST=127.0.0.1", "--env=HARNESS_PORT=0"),
        *(f"--env={each}={given[each]}" for each in service.get("environment", ())),
        *((f"--volume={volume}",) if volume else ()),
        *(image, *own, *options),
    )
    stack.callback(podman, "rm", "--force", container)
    return container


def announced(container: str) -> str:
    """The address that a service prints when it serves."""
    ends_at = time.monotonic() + START_S
    while not (printed := podman("logs", container)).endswith("}"):
        assert time.monotonic() < ends_at, printed
        time.sleep(0.2)
    document = json.loads(printed)
    assert "url" in document, printed
    url: str = document["url"]
    return url


@pytest.mark.parametrize("name", ["router", "server", "page"])
def test_compose_starts_commands_with_options_that_they_have(name: str) -> None:
    """Without privileges, by variables and flags of their own, and with more time to end than they take."""
    service = COMPOSE[name]
    command, *options = service["command"]
    params = get_command(app).commands[command].params  # type: ignore[attr-defined]
    flags = {flag for each in params for flag in each.opts}
    variables = {each.envvar for each in params}

    assert {option.partition("=")[0] for option in options} <= flags
    assert {*service["environment"]} <= variables
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert float(service["stop_grace_period"].removesuffix("s")) > ServerSettings().stop_grace_s + 3


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="there is no kubectl here to render with")
def test_kubectl_renders_the_manifests() -> None:
    """Gateway and router run without privileges; Kubernetes gives the router longer than it takes to end."""
    command = ("kubectl", "kustomize", DEPLOY / "kubernetes")
    rendered = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    objects = [*yaml.safe_load_all(rendered)]
    workloads = [each for each in objects if "template" in each.get("spec", {})]
    pods = {each["metadata"]["name"]: each["spec"]["template"]["spec"] for each in workloads}

    for name in ("gateway", "sessions"):
        [container] = pods[name]["containers"]
        assert pods[name]["securityContext"]["runAsNonRoot"] is True
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert pods["sessions"]["terminationGracePeriodSeconds"] > ServerSettings().stop_grace_s + 3
