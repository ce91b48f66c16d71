"""A profile says everything about an agent, and says what is wrong with it in one line."""

from itertools import pairwise
from pathlib import Path

import pytest

from harness.errors import ScenarioError
from harness.rollouts.agents.agent_environment import with_expanded
from harness.rollouts.agents.profile import PROFILE_FILE, expand, load_profile
from harness.rollouts.agents.programs import (
    bundled_agent,
    bundled_agents,
    bundled_profile,
    prepare_profile,
    variables_of,
)
from harness.rollouts.sandboxes.spec import SandboxSpec

PROFILE = """
schema_version = 1
description = "Prints."
dialect = "openai_chat"
command = ["python", "-c", "print()"]
version_command = ["python", "--version"]

[install]
kind = "python"
package = "sniffio"
"""


def written(folder: Path, more: str = "", *, profile: str = PROFILE, lock: str = "sniffio==1.3.1\n") -> Path:
    """A folder with a profile."""
    folder.mkdir(exist_ok=True)
    (folder / PROFILE_FILE).write_text(profile + more, encoding="utf-8")
    (folder / "requirements.txt").write_text(lock, encoding="utf-8")
    return folder


def test_a_profile_has_the_version_of_its_lock_file(tmp_path: Path) -> None:
    profile = load_profile(written(tmp_path / "mine"))

    assert (profile.name, profile.version) == ("mine", "1.3.1")
    assert profile.is_served


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("\n[instal]\n", "instal"),
        ("\n[session]\nmatchings = []\n", "matchings"),
        ('\n[files]\n"../.bashrc" = "x"\n', "inside the home directory"),
        ('\n[files]\n"/etc/x" = "x"\n', "inside the home directory"),
        ("\n[session]\nselection = 'best'\n", "selection"),
        ("\n[", "profile.toml"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, more: str, words: str) -> None:
    with pytest.raises(ScenarioError, match=words) as refused:
        load_profile(written(tmp_path, more))

    assert str(tmp_path / PROFILE_FILE) in refused.value.message


def test_a_profile_that_installs_nothing_has_files_and_a_setup(tmp_path: Path) -> None:
    """`kind = "none"` is no [install]; files are those beside the profile."""
    plain = PROFILE.partition("version_command")[0]
    more = 'setup = ["sh", "prepare.sh"]\ncwd = "work"\nworkdir_files = ["prepare.sh"]\n[install]\nkind = "none"\n'
    with pytest.raises(ScenarioError, match=r"workdir_files: expected a file .* 'prepare.sh', which does not exist"):
        load_profile(written(tmp_path, more, profile=plain))
    (tmp_path / "prepare.sh").touch()
    profile = load_profile(tmp_path)
    with pytest.raises(ScenarioError, match=r"cwd: expected a path inside the rollout's directory, got '\.\./x'"):
        load_profile(written(tmp_path, more.replace('"work"', '"../x"'), profile=plain))
    for wrong in ('kind = "none"\npackage = "sniffio"', 'kind = "python"'):
        with pytest.raises(ScenarioError, match=r"install\.package: expected"):
            load_profile(written(tmp_path, more.replace('kind = "none"', wrong), profile=plain))

    assert profile.spec.install is None
    assert (profile.spec.setup, profile.spec.cwd) == (("sh", "prepare.sh"), "work")


async def test_a_profile_has_a_sandbox(tmp_path: Path) -> None:
    """Of every rollout of the agent; a wrong table is refused with its key."""
    plain = PROFILE.partition("version_command")[0]
    profile = load_profile(written(tmp_path, '[sandbox]\nkind = "bwrap"\npids = 64\n', profile=plain))
    with pytest.raises(ScenarioError, match=r"profile\.toml: sandbox\.pids: "):
        load_profile(written(tmp_path, '[sandbox]\nkind = "bwrap"\npids = 1\n', profile=plain))

    assert (await prepare_profile(profile, print)).sandbox == SandboxSpec(kind="bwrap", pids=64)


def test_a_lock_file_without_the_agent_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match=r"requirements\.txt: expected a version of 'sniffio'"):
        load_profile(written(tmp_path, lock="anyio==4.9.0\n"))


def test_references_are_variables() -> None:
    """In a file they are escaped; what is none is left alone; what is missing is named."""
    variables = {"KEY": 'a"b'}

    assert expand("x ${KEY} $KEY {KEY}", variables) == 'x a"b $KEY {KEY}'
    assert expand('{"key": "${KEY}"}', variables, escaped=True) == '{"key": "a\\"b"}'
    with pytest.raises(ValueError, match="NO_SUCH"):
        expand("${NO_SUCH}", variables)


def test_a_place_with_a_dollar_in_its_name_is_no_reference(tmp_path: Path) -> None:
    """The operator's PATH and the profile's folder are taken as they are; what the profile says is expanded."""
    profile = load_profile(written(tmp_path / "${mine}", '[env]\nLIBRARY = "${HARNESS_AGENT_FOLDER}/lib"\n'))
    variables = with_expanded({}, variables_of(profile, {"PATH": "/opt/${tools}/bin"}))

    assert "/opt/${tools}/bin" in variables["PATH"].split(":")
    assert variables["HARNESS_AGENT_FOLDER"] == str(tmp_path / "${mine}")
    assert variables["LIBRARY"] == str(tmp_path / "${mine}" / "lib")


@pytest.mark.parametrize("name", bundled_agents())
def test_a_prompt_is_no_option(name: str) -> None:
    """One may begin with a dash: it stands behind `--`, or is the value of an option in the same word."""
    if bundled_agent(name).name != PROFILE_FILE:
        return
    command = bundled_profile(name).spec.command
    for before, word in pairwise(command):
        if "${HARNESS_INSTRUCTION}" in word:
            assert before == "--" or (word.startswith("--") and word.endswith("=${HARNESS_INSTRUCTION}"))


@pytest.mark.parametrize("name", bundled_agents())
def test_every_bundled_agent_is_whole(name: str) -> None:
    """Its profile can be read, and what it pins is pinned."""
    if bundled_agent(name).name == PROFILE_FILE:
        assert bundled_profile(name).version
