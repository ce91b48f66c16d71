"""deploy/kubernetes names what exists."""

from typing import Any

import pytest
import yaml
from typer.main import get_command

from harness.cli.main import app
from tests.checkout import ROOT

FOLDER = ROOT / "deploy" / "kubernetes"
FILES = [FOLDER / name for name in yaml.safe_load((FOLDER / "kustomization.yaml").read_text())["resources"]]
OBJECTS: list[Any] = [
    each for file in FILES for each in yaml.safe_load_all(file.read_text()) if each["kind"] != "Namespace"
]

GATEWAY_OPTIONS = {
    *("--host", "--port", "--policy", "--enable-rl", "--disable-retries", "--disable-circuit-breaker"),
    *("--disable-worker-overload-protection", "--health-check-endpoint", "--selector"),
    *("--service-discovery", "--service-discovery-port", "--service-discovery-namespace"),
}
"""Of `smg launch` 1.13.0, as its `--help` has them."""


def named(kind: str, name: str) -> Any:
    """The object."""
    [found] = [each for each in OBJECTS if (each["kind"], each["metadata"]["name"]) == (kind, name)]
    return found


def container(kind: str, name: str) -> Any:
    """The only one of its pods."""
    [found] = named(kind, name)["spec"]["template"]["spec"]["containers"]
    return found


def test_the_gateway_finds_the_engines() -> None:
    """By their label, at their port, in their namespace, with the right to look; and health asks for no token."""
    options = dict(argument.partition("=")[::2] for argument in container("Deployment", "gateway")["args"])
    engine, [port] = named("Deployment", "engine"), container("Deployment", "engine")["ports"]
    label, _, value = options["--selector"].partition("=")
    [rule] = named("Role", "see-pods")["rules"]

    assert {*options} <= GATEWAY_OPTIONS
    assert engine["spec"]["template"]["metadata"]["labels"] == {label: value}
    assert options["--service-discovery-port"] == str(port["containerPort"])
    assert f"--port={port['containerPort']}" in container("Deployment", "engine")["args"]
    assert {each["metadata"]["namespace"] for each in OBJECTS} == {options["--service-discovery-namespace"]}
    assert (rule["resources"], {*rule["verbs"]}) == (["pods"], {"get", "list", "watch"})
    assert named("RoleBinding", "gateway-sees-pods")["roleRef"]["name"] == "see-pods"
    account = named("Deployment", "gateway")["spec"]["template"]["spec"]["serviceAccountName"]
    assert named("RoleBinding", "gateway-sees-pods")["subjects"][0]["name"] == account


def test_the_router_is_started_with_options_that_it_has() -> None:
    """By their variables; it asks the gateway at its Service, and keeps its sessions on its volume."""
    router = get_command(app).commands["router"]  # type: ignore[attr-defined]
    known = {option.envvar for option in router.params}
    given = {each["name"]: each.get("value") for each in container("StatefulSet", "sessions")["env"]}
    gateway = named("Service", "gateway")

    assert {*given} <= known
    assert given["HARNESS_ROUTER_URL"] == f"http://gateway:{gateway['spec']['ports'][0]['port']}"
    assert given["HARNESS_STORE"].startswith("/store/")
    assert named("StatefulSet", "sessions")["spec"]["replicas"] == 1


@pytest.mark.parametrize("kind", ["Deployment", "StatefulSet"])
def test_selectors_select(kind: str) -> None:
    """The pods of their own template; and every port that a Service or a probe names is one of the container's."""
    for each in [each for each in OBJECTS if each["kind"] == kind]:
        template = each["spec"]["template"]
        assert each["spec"]["selector"]["matchLabels"] == template["metadata"]["labels"]
        ports = {port["name"] for found in template["spec"]["containers"] for port in found["ports"]}
        probes = [
            found.get(probe)
            for found in template["spec"]["containers"]
            for probe in ("readinessProbe", "livenessProbe")
        ]
        assert {probe["httpGet"]["port"] for probe in probes if probe} <= ports
    services = [each for each in OBJECTS if each["kind"] == "Service"]
    assert {each["spec"]["ports"][0]["targetPort"] for each in services} == {"http"}
