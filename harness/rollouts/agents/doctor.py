"""Check of an installed agent: start it once, without a session or a model call."""

import os
import tempfile
from typing import NamedTuple

from harness.credentials import without_credentials
from harness.dialects.dialect import DIALECTS
from harness.errors import HarnessError
from harness.machine.inherited_variables import for_programs
from harness.machine.uv import run
from harness.rollouts.agents.agent_environment import USER_FOLDERS, client_variables, with_expanded
from harness.rollouts.agents.agent_runner import resolve_command
from harness.rollouts.agents.install import environment_of, is_installed
from harness.rollouts.agents.profile import AgentProfile, expand
from harness.rollouts.agents.programs import variables_of, with_own_program
from harness.rollouts.client.session_server import SessionHandle

_START_S = 60.0
# Variables of a profile may reference those of a session.
_NO_SESSION = SessionHandle("none", "http://127.0.0.1:9/sessions/none", "none")


class AgentFinding(NamedTuple):
    """One checked property."""

    check: str
    is_well: bool
    found: str
    """With the next step if it is not well."""


async def examine_agent(profile: AgentProfile) -> list[AgentFinding]:
    """Return the findings in the order of fixing."""
    served = ", ".join(dialect.name for dialect in DIALECTS)
    findings = [
        AgentFinding(
            "dialect",
            profile.is_served,
            profile.spec.dialect if profile.is_served else f"{profile.spec.dialect} is not served; served: {served}",
        )
    ]
    if not is_installed(profile):
        missing = f"there is no {environment_of(profile)}; run: harness agent install {profile.name}"
        return [*findings, AgentFinding("environment", False, missing)]
    findings.append(AgentFinding("environment", True, str(environment_of(profile))))
    return [*findings, await _examine_version(profile)]


async def _examine_version(profile: AgentProfile) -> AgentFinding:
    inherited = {name: value for name, value in for_programs(os.environ).items() if name not in USER_FOLDERS}
    with tempfile.TemporaryDirectory(prefix="harness-doctor-") as home:
        told = client_variables(_NO_SESSION, "none")
        try:
            base = {**without_credentials(inherited), **told, "HOME": home}
            env = with_expanded(base, variables_of(profile, os.environ))
            words = with_own_program(profile, profile.spec.version_command)
            command = resolve_command([expand(word, env) for word in words], env["PATH"])
            ended = await run(*command, deadline_s=_START_S, env=env)
        except (OSError, ValueError, HarnessError) as error:
            return AgentFinding("version", False, f"it does not start: {error}; {_again(profile)}")
    said = (ended.output + ended.messages).strip()
    if ended.code or profile.version not in said:
        return AgentFinding("version", False, f"expected {profile.version}, it said {said[-200:]!r}; {_again(profile)}")
    return AgentFinding("version", True, profile.version)


def _again(profile: AgentProfile) -> str:
    folder = environment_of(profile)
    return f"remove {folder} and run: harness agent install {profile.name}"
