"""The images of `deploy/`: built without a network, and started as `compose.yaml` starts them."""

import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import yaml
from typer.main import get_command

from harness.cli.main import app
from harness.lab.models.small_tokenizer import write_small_tokenizer
from harness.machine.uv import run_uv_blocking
from harness.server.settings import ServerSettings
from tests.checkout import ROOT
from tests.sandbox_programs import configure_podman, podman_image, require_program

DEPLOY = ROOT / "deploy"
START_S = 60.0
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))["services"]


def podman(*arguments: str | Path) -> str:
    done = subprocess.run(("podman", *arguments), capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


@pytest.fixture(name="image")
def _image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """All of the server's image but its packages, on a base of this machine's files."""
    require_program("podman")
    configure_podman(tmp_path, monkeypatch)
    name = f"localhost/harness-server-test:{uuid4().hex[:12]}"
    podman(
        *("build", "--quiet", "--network", "none", "--format", "docker", "--tag", name, "--target", "runtime"),
        *("--build-arg", f"BASE={podman_image()}", "--file", DEPLOY / "Dockerfile", tmp_path),
    )
    yield name
    podman("image", "rm", "--force", name)


@pytest.fixture(name="packages")
def _packages(wheel: Path, tmp_path: Path) -> Path:
    """What the image has at /opt/harness, for the Python of the base."""
    place = tmp_path / "packages"
    run_uv_blocking("pip", "install", "--target", str(place), "--python", sys.executable, str(wheel), deadline_s=280)
    return place


def test_the_server_starts_without_privileges_and_ends_in_order(image: str, packages: Path, tmp_path: Path) -> None:
    """As user 10001, on a read-only root, without capabilities; healthy, and exit code 0 after SIGTERM."""
    store = tmp_path / "store"
    write_small_tokenizer(store / "tokenizer")
    for place in (store, store / "tokenizer"):
        os.chown(place, 10001, 10001)
    container = podman(
        *("run", "--detach", "--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL"),
        *("--security-opt", "no-new-privileges", "--network", "host", "--env", "HARNESS_HOST=127.0.0.1"),
        *("--env", "HARNESS_PORT=0", "--env", "HARNESS_ADMIN_TOKEN=t0ken", "--env", "PYTHONPATH=/opt/harness"),
        *("--volume", f"{packages}:/opt/harness:ro", "--volume", f"{store}:/store", "--entrypoint", "python3", image),
        *("-m", "harness", "serve", "--engine", "scripted", "--tokenizer", "/store/tokenizer", "--json"),
    )
    try:
        url = announced(container)
        with urllib.request.urlopen(f"{url}/health", timeout=30) as answer:
            assert answer.status == 200
        described = json.loads(podman("inspect", container))[0]
        podman("stop", "--time", "30", container)
        state = json.loads(podman("inspect", container))[0]["State"]
        assert state["ExitCode"] == 0, podman("logs", container)
    finally:
        podman("rm", "--force", container)
    assert described["Config"]["User"] == "10001:10001"
    assert described["Config"]["StopSignal"] in (15, "15", "SIGTERM")
    assert described["Config"]["Healthcheck"]["Test"][0] == "CMD"
    assert (store / "sessions.db").is_file()


def announced(container: str) -> str:
    """The address that the server prints when it serves."""
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
