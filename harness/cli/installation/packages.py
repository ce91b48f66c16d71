"""Installed packages: those that the harness needs, and its extras."""

from collections.abc import Iterable, Mapping
from importlib import metadata
from typing import TYPE_CHECKING, NamedTuple

from harness.machine.findings import Finding, Level

if TYPE_CHECKING:
    from packaging.requirements import Requirement

DISTRIBUTION = "session-harness"

EXTRAS: Mapping[str, str] = {
    "run": "agents, engines and gateways that the harness installs; routers, shards, faults of the network",
    "local": "the local engine, on this machine's CPU or GPU",
    "learner": "`harness train` with the learner that is shipped",
    "otel": "spans for OpenTelemetry (`--otlp`)",
    "parquet": "samples as Parquet files",
    "ray": "rollouts on the nodes of a Ray cluster",
    "renderers": "model families whose chat templates rewrite history",
    "plots": "charts of `harness report --plots`",
    "tensorboard": "`--report tensorboard` of `harness train`",
    "wandb": "`--report wandb` of `harness train`",
    "trackio": "`--report trackio` of `harness train`",
}
"""Purpose of each extra; `dev` and `docs` are for contributors."""


class _Installed(NamedTuple):
    versions: list[str]
    missing: list[str]
    """Requirements without a package."""
    others: list[str]
    """Packages at another version than required."""


def examine_packages() -> list[Finding]:
    from packaging.requirements import Requirement

    try:
        stated = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        step = f"pip install {DISTRIBUTION}, or `pip install -e .` in a checkout"
        return [Finding("packages", Level.WARN, "this harness is a folder that is not installed", step)]
    all_of_them = [Requirement(each) for each in stated]
    base = _look_up(each for each in all_of_them if each.marker is None or each.marker.evaluate({"extra": ""}))
    wrong = [*(f"{each} is missing" for each in base.missing), *base.others]
    step = f"pip install --upgrade {DISTRIBUTION}" if wrong else ""
    found = "; ".join(wrong) or ", ".join(base.versions)
    findings = [Finding("packages", Level.FAIL if wrong else Level.OK, found, step)]
    for extra, purpose in EXTRAS.items():
        of_extra = [each for each in all_of_them if _is_of(each, extra)]
        findings.append(_examine_extra(extra, purpose, _look_up(of_extra)))
    return findings


def _examine_extra(extra: str, purpose: str, installed: _Installed) -> Finding:
    name, step = f"extra {extra}", f"pip install '{DISTRIBUTION}[{extra}]'"
    if installed.missing:
        return Finding(name, Level.OK, f"not installed; for {purpose}: {step}")
    if installed.others:
        return Finding(name, Level.WARN, f"for {purpose}: {'; '.join(installed.others)}", step)
    return Finding(name, Level.OK, f"{', '.join(installed.versions)}; for {purpose}")


def _is_of(requirement: "Requirement", extra: str) -> bool:
    marker = requirement.marker
    return marker is not None and marker.evaluate({"extra": extra}) and not marker.evaluate({"extra": ""})


def _look_up(requirements: "Iterable[Requirement]") -> _Installed:
    installed = _Installed([], [], [])
    for each in requirements:
        try:
            version = metadata.version(each.name)
        except metadata.PackageNotFoundError:
            installed.missing.append(str(each).partition(";")[0].strip())
            continue
        if each.specifier.contains(version, prereleases=True):
            installed.versions.append(f"{each.name} {version}")
        else:
            installed.others.append(f"expected {each.name}{each.specifier}, there is {version}")
    return installed
