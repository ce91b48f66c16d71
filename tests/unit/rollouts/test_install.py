"""An agent's environment is made once, whole, by one process at a time, and examined by starting it."""

import asyncio
from pathlib import Path

import pytest

from harness.errors import AgentError
from harness.rollouts.agents.doctor import examine_agent
from harness.rollouts.agents.install import environment_of, find_npm, install_agent, is_installed, search_path
from harness.rollouts.agents.profile import AgentProfile, expand, load_profile
from harness.rollouts.agents.programs import bundled_profile, prepare_profile, with_own_program
from tests.unit.rollouts.test_profile import PROFILE, written

VERSION = "import importlib.metadata as m; print(m.version('sniffio'))"


@pytest.fixture(name="profile")
def _profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AgentProfile:
    """An agent that is one pure package, and a cache of its own."""
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "cache"))
    text = PROFILE.replace('["python", "--version"]', f'["python", "-c", "{VERSION}"]')
    variables = '\n[env]\nOPENAI_API_BASE = "${OPENAI_BASE_URL}"\n'
    return load_profile(written(tmp_path / "mine", variables, profile=text))


async def test_two_at_once_make_one(profile: AgentProfile) -> None:
    """One works, the other waits and says so; nothing half-made is left, and the agent starts."""
    assert not is_installed(profile)
    said: list[str] = []
    both = await asyncio.gather(*(install_agent(profile, said.append) for _ in range(2)))

    assert both[0] == both[1] == environment_of(profile)
    assert sorted(line.split()[0] for line in said) == ["installing", "waiting"]
    assert sorted(path.suffix for path in both[0].parent.iterdir()) == ["", ".lock", ".log"]
    assert [(each.check, each.level) for each in await examine_agent(profile)] == [
        ("dialect", "ok"),
        ("environment", "ok"),
        ("version", "ok"),
    ]


async def test_a_killed_installer_leaves_nothing_that_looks_complete(profile: AgentProfile) -> None:
    leftover = environment_of(profile).with_name(f".{environment_of(profile).name}.staging-abc")
    (leftover / "built" / "bin").mkdir(parents=True)
    assert not is_installed(profile)

    await install_agent(profile, print)

    assert is_installed(profile)
    assert not leftover.exists()


async def test_nothing_of_an_environment_is_shared_or_edited_in_place(profile: AgentProfile) -> None:
    """An agent works beside it: what it changes there is in no installer's cache and in no other environment."""
    environment = await install_agent(profile, print)
    files = [path for path in environment.rglob("*") if path.is_file() and not path.is_symlink()]

    assert any(path.name == "METADATA" for path in files)
    assert {path.stat().st_nlink for path in files} == {1}
    assert not any(path.stat().st_mode & 0o222 for path in files)


async def test_a_model_finds_the_programs_of_the_machine(profile: AgentProfile) -> None:
    """The agent's own interpreter, which runs the agent, comes last on PATH."""
    environment = await install_agent(profile, print)
    agent = await prepare_profile(profile, print)

    assert agent.command[0] == str(environment / "bin" / "python")
    assert agent.env["PATH"].split(":")[-1] == str(environment / "bin")
    assert with_own_program(profile, ["no-program-of-its-own", "x"]) == ("no-program-of-its-own", "x")


async def test_a_script_for_node_runs_on_the_node_that_came_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "${cache}"))
    profile = bundled_profile("pi")
    programs, node = search_path(profile)
    for program, text in ((programs / "pi", "#!/usr/bin/env node\n"), (node / "node", "\x7fELF")):
        program.parent.mkdir(parents=True)
        program.write_text(text)
        program.chmod(0o755)
    command = with_own_program(profile, ["pi", "--print"])

    assert [expand(word, {}) for word in command] == [str(node / "node"), str(programs / "pi"), "--print"]


async def test_the_working_directory_configures_no_installer(
    tmp_path: Path, profile: AgentProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be a stranger's checkout, whose uv.toml names an index of their own; the cache may be in it."""
    (tmp_path / "uv.toml").write_text("no-index = true\ncache-dir = './strange'\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HARNESS_CACHE", "cache")
    await install_agent(profile, print)

    assert is_installed(profile)
    assert not (tmp_path / "strange").exists()


async def test_the_build_of_a_package_is_not_run(tmp_path: Path, profile: AgentProfile) -> None:
    """It would be code of anybody's, as the user; only wheels are installed."""
    source = tmp_path / "sniffio"
    source.mkdir()
    (source / "setup.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nfrom setuptools import setup\nsetup()\n")
    built = load_profile(written(tmp_path / "built", lock=f"sniffio==1.3.1\nbuilt @ {source.as_uri()}\n"))
    with pytest.raises(AgentError, match="mend what it names"):
        await install_agent(built, print)

    assert not (tmp_path / "ran").exists()


async def test_a_package_that_cannot_be_had_is_named(tmp_path: Path, profile: AgentProfile) -> None:
    """With the installer's last words, and the file that has all of them."""
    wrong = load_profile(written(tmp_path / "wrong", lock="sniffio==0.0.0.1\n"))
    with pytest.raises(AgentError, match=r"(?s)mend what it names.*\.log.*sniffio==0\.0\.0\.1") as failed:
        await install_agent(wrong, print)

    assert "sniffio" in environment_of(wrong).with_suffix(".log").read_text()
    assert str(environment_of(wrong).with_suffix(".log")) in failed.value.message
    assert not is_installed(wrong)


async def test_another_lock_file_is_another_environment(tmp_path: Path, profile: AgentProfile) -> None:
    before = environment_of(profile)
    written(profile.folder, lock="sniffio==1.3.0\n")

    assert environment_of(load_profile(profile.folder)) != before


async def test_an_agent_that_is_not_there_is_told_how_to_get(profile: AgentProfile) -> None:
    found = {each.check: each for each in await examine_agent(profile)}

    assert found["environment"].level == "fail"
    assert found["environment"].next_step == "harness agent install mine"


async def test_an_agent_of_another_version_is_not_well(profile: AgentProfile) -> None:
    """Its lock file says one thing, it says another."""
    await install_agent(profile, print)
    (info,) = environment_of(profile).glob("lib/python*/site-packages/sniffio-*.dist-info")
    (info / "METADATA").unlink()  # it is read-only
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sniffio\nVersion: 1.0\n")

    version = (await examine_agent(profile))[-1]
    assert (version.check, version.level) == ("version", "fail")
    assert "expected 1.3.1" in version.found


def test_a_machine_without_npm_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(AgentError, match=r"npm is needed.*install Node\.js with npm"):
        find_npm()
