"""What a box shows of this machine for a program: its installation and its files, and no folder around them."""

import sys
from pathlib import Path

from harness.rollouts.agents.agent_environment import find_programs
from harness.rollouts.agents.task import ProgramAgent


def test_a_script_is_shown_without_its_neighbors(tmp_path):
    """A check with its answers may lie beside it."""
    script = tmp_path / "agent.py"
    script.touch()
    (tmp_path / "check.py").touch()
    shown = find_programs(ProgramAgent("a", ("/bin/sh", str(script), "/no/such/file", str(tmp_path))))
    assert script in shown
    assert not any(tmp_path.is_relative_to(path) for path in shown)
    assert not any(path.is_relative_to("/usr/bin") for path in shown)


def test_a_virtual_environment_is_shown_with_the_python_it_leads_to(tmp_path):
    """Both prefixes, since its interpreter is a link."""
    environment = tmp_path / "venv"
    (environment / "bin").mkdir(parents=True)
    (environment / "pyvenv.cfg").touch()
    (environment / "bin" / "python").symlink_to(sys.executable)
    shown = find_programs(ProgramAgent("a", (str(environment / "bin" / "python"), "-c", "")))
    base = Path(sys.base_prefix)
    assert environment in shown
    assert base in shown or base == Path("/usr")


def test_an_installation_is_shown_once(tmp_path):
    """A program below a folder that is shown needs no mount of its own."""
    program = tmp_path / "agent" / "bin" / "run"
    program.parent.mkdir(parents=True)
    program.touch()
    shown = find_programs(ProgramAgent("a", (str(program),), folders=(tmp_path / "agent",)))
    assert [path for path in shown if path.is_relative_to(tmp_path)] == [tmp_path / "agent"]
