"""An engine's environment is made once, whole, by one process at a time; the CPU build of torch or none."""

import asyncio
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import uv

from harness.errors import LaneError
from harness.lab.lanes import LaneEngine
from harness.lab.lanes.environment import Requirements, provide_python, torch_source


@pytest.fixture(name="requirements")
def _requirements(cache: Path, tmp_path: Path) -> Requirements:
    """An environment that takes a second: one pure package, one that is overridden away, one that is held back."""
    return written(tmp_path, "sniffio==1.3.1\nanyio\n", "idna ; python_version < '3'\n", "anyio==4.9.0\n")


def written(directory: Path, *contents: str) -> Requirements:
    paths = [directory / f"{name}.txt" for name in ("requirements", "overrides", "constraints")]
    for path, content in zip(paths, contents, strict=True):
        path.write_text(content, encoding="utf-8")
    return Requirements(LaneEngine.SGLANG, *paths)


def packages(python: Path) -> set[str]:
    program = "from importlib.metadata import distributions as d; print(*(f'{x.name}=={x.version}' for x in d()))"
    return set(subprocess.run([python, "-c", program], capture_output=True, text=True, check=True).stdout.split())


async def test_requirements_overrides_and_constraints_count(requirements: Requirements) -> None:
    """What is installed is what the three files say, and nothing of ours."""
    python = await provide_python(requirements, print)

    found = packages(python)
    assert {"sniffio==1.3.1", "anyio==4.9.0"} <= found
    assert not any(name.startswith(("idna==", "session-harness==")) for name in found)


async def test_two_at_once_make_one(requirements: Requirements, cache: Path) -> None:
    """One works, the other waits and says so; nothing is left over."""
    said: list[str] = []
    both = await asyncio.gather(*(provide_python(requirements, said.append) for _ in range(2)))

    assert both[0] == both[1]
    assert sorted(line.split()[0] for line in said) == ["installing", "waiting"]
    folder = requirements.directory
    assert sorted(path.name for path in folder.parent.iterdir()) == [folder.name, f"{folder.name}.lock"]


async def test_what_cannot_be_installed_is_named(cache: Path, tmp_path: Path) -> None:
    wrong = written(tmp_path, "sniffio==0.0.0.1\n", "", "")
    with pytest.raises(LaneError, match=r"(?s)failed with exit code 1; mend what it names.*sniffio==0\.0\.0\.1"):
        await provide_python(wrong, print)

    assert not wrong.directory.exists()


async def test_a_changed_file_is_another_environment(requirements: Requirements) -> None:
    before = requirements.directory
    requirements.constraints.write_text("anyio==4.10.0\n")

    assert requirements.directory != before


def fake_torch(folder: Path, version: str) -> None:
    """A wheel that says it is torch."""
    folder.mkdir()
    with zipfile.ZipFile(folder / f"torch-{version}-py3-none-any.whl", "w") as wheel:
        info = f"torch-{version}.dist-info"
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture(name="index")
def _index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all that pip can reach; uv reaches nothing."""
    folder = tmp_path / "index"
    settings = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": folder, "PIP_CONFIG_FILE": "/dev/null", "UV_OFFLINE": "1"}
    for name, value in {**settings, "UV_CACHE_DIR": tmp_path / "uv", "UV_NO_CONFIG": "1"}.items():
        monkeypatch.setenv(name, str(value))
    return folder


@pytest.fixture(name="empty")
def _empty(tmp_path: Path) -> Path:
    """The interpreter of an environment without torch."""
    subprocess.run([uv.find_uv_bin(), "venv", "--quiet", "--python", sys.executable, tmp_path / "empty"], check=True)
    return tmp_path / "empty" / "bin" / "python"


async def test_a_cpu_build_that_only_pip_finds_is_handed_to_uv(index: Path, empty: Path, tmp_path: Path) -> None:
    """It may be configured with folders that uv does not read."""
    fake_torch(index, "2.13.0+cpu")
    options = await torch_source(empty, tmp_path / "wheels")

    assert options == ("--find-links", str(tmp_path / "wheels"))
    assert [path.name for path in (tmp_path / "wheels").iterdir()] == ["torch-2.13.0+cpu-py3-none-any.whl"]


async def test_a_cuda_build_is_named_and_refused(index: Path, empty: Path, tmp_path: Path) -> None:
    fake_torch(index, "2.13.0")
    with pytest.raises(LaneError, match=r"pip offers 2\.13\.0, a CUDA build, and uv finds no CPU build; configure"):
        await torch_source(empty, tmp_path / "wheels")


async def test_no_torch_at_all_is_said(index: Path, empty: Path, tmp_path: Path) -> None:
    index.mkdir()
    with pytest.raises(LaneError, match="pip offers none"):
        await torch_source(empty, tmp_path / "wheels")
