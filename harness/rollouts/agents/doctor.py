"""Check of an installed agent: start it once, without a session or a model call."""

import os
import tempfile
from pathlib import Path

from harness.credentials import without_credentials
from harness.dialects.dialect import DIALECTS
from harness.errors import HarnessError
from harness.machine.findings import Finding, Level
from harness.machine.program import for_programs, run
from harness.rollouts.agents.agent_environment import USER_FOLDERS, client_variables, with_expanded
from harness.rollouts.agents.agent_runner import resolve_command
from harness.rollouts.agents.install import environment_of, is_installed
from harness.rollouts.agents.profile import AgentProfile, expand
from harness.rollouts.agents.programs import variables_of, with_own_program
from harness.rollouts.client.session_server import SessionHandle

_START_S = 60.0
# Variables of a profile may reference the session's.
_NO_SESSION = SessionHandle("none", "http://127.0.0.1:9/sessions/none", "none")


async def examine_agent(profile: AgentProfile) -> list[Finding]:
    """Return the findings in the order of fixing."""
    served = ", ".join(dialect.name for dialect in DIALECTS)
    dialect, environment = profile.spec.dialect, environment_of(profile)
    findings = [
        Finding("dialect", Level.OK, dialect)
        if profile.is_served
        else Finding("dialect", Level.FAIL, f"{dialect} is not served; served: {served}")
    ]
    if not is_installed(profile):
        step = f"harness agent install {profile.name}"
        return [*findings, Finding("environment", Level.FAIL, f"there is no {environment}", step)]
    return [*findings, Finding("environment", Level.OK, str(environment)), await _examine_version(profile)]


async def _examine_version(profile: AgentProfile) -> Finding:
    again = f"remove {environment_of(profile)} and run: harness agent install {profile.name}"
    inherited = {name: value for name, value in for_programs(os.environ).items() if name not in USER_FOLDERS}
    with tempfile.TemporaryDirectory(prefix="harness-doctor-") as home:
        told = client_variables(_NO_SESSION, "none")
        try:
            base = {**without_credentials(inherited), **told, "HOME": home}
            env = with_expanded(base, variables_of(profile, os.environ))
            words = with_own_program(profile, profile.spec.version_command)
            command = resolve_command([expand(word, env) for word in words], env["PATH"], Path(home))
            ended = await run(*command, deadline_s=_START_S, env=env)
        except (OSError, ValueError, HarnessError) as error:
            return Finding("version", Level.FAIL, f"it does not start: {error}", again)
    said = (ended.output + ended.messages).strip()
    if ended.code or profile.version not in said:
        return Finding("version", Level.FAIL, f"expected {profile.version}, it said {said[-200:]!r}", again)
    return Finding("version", Level.OK, profile.version)
