"""bwrap and podman as the tests use them, and an image that is made of this machine's own files.

No image registry is needed: the image is a shell, a few commands, and this Python with the libraries of all of them.
"""

import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from functools import cache
from pathlib import Path

import pytest

_COMMANDS = (
    *("sh", "bash", "env", "printenv", "sleep", "kill", "true", "setsid", "id", "uname", "mount", "dd"),
    *(
        "cat",
        "head",
        "tail",
        "grep",
        "sed",
        "tr",
        "cut",
        "ls",
        "rm",
        "mkdir",
        "touch",
        "readlink",
        "realpath",
        "dirname",
        "basename",
        "chmod",
        "tar",
    ),
)
# What is loaded by name, or by the programs of agents.
_LOADED = ("libgcc_s.so.1", "libstdc++.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1", "libm.so.6")
_LEFT_OUT = re.compile(
    r"/(test|site-packages|__pycache__|config-[^/]*|idlelib|ensurepip|tkinter|lib2to3|pydoc_data)(/|$)"
)
_FORMAT = "4"
_MAKE_S = 300
# runc and limits of its own, because the defaults of an engine need privileges that a small machine does not give.
_CONFIGURATION = """
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]
"""

builds_images = pytest.mark.xdist_group("images")
"""Of tests that build images, or remove some: podman fails to build one while another is removed."""


def require_program(name: str) -> None:
    """Skip or, in CI, fail the test without a system's program; skip it without root, who owns cgroups and mounts."""
    if shutil.which(name) is None:
        reason = f"expected {name} on PATH: run .ci/install_sandboxes as root"
        pytest.fail(reason) if os.environ.get("CI") == "true" else pytest.skip(reason)
    if os.getuid():
        pytest.skip("expected root, who may make cgroups, mounts and containers of runc")


def configure_podman(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let podman of this process and below it start containers here."""
    file = folder / "containers.conf"
    file.write_text(_CONFIGURATION, encoding="utf-8")
    monkeypatch.setenv("CONTAINERS_CONF", str(file))


@cache
def podman_image() -> str:
    """Return the name of the image, made if podman has none. Needs `configure_podman`."""
    files = sorted({file for name in _COMMANDS if (file := shutil.which(name)) is not None})
    told = f"{_FORMAT} {_LOADED} {sys.version} {files} {_LEFT_OUT.pattern}"
    name = f"localhost/harness-test:{hashlib.sha256(told.encode()).hexdigest()[:16]}"
    if subprocess.run(("podman", "image", "exists", name), check=False, timeout=_MAKE_S).returncode == 0:
        return name
    with tempfile.TemporaryDirectory() as folder:
        archive = Path(folder) / "image.tar"
        with tarfile.open(archive, "w") as tar:
            _add_system(tar, files)
            _add_python(tar)
        subprocess.run(("podman", "import", archive, name), check=True, capture_output=True, timeout=_MAKE_S)
    return name


def _add_system(tar: tarfile.TarFile, files: list[str]) -> None:
    for folder in ("usr", "usr/bin", "usr/lib", "usr/lib64", "tmp", "etc", "proc", "sys", "dev", "run", "root"):
        info = tarfile.TarInfo(folder)
        info.type, info.mode = tarfile.DIRTYPE, 0o1777 if folder == "tmp" else 0o755
        tar.addfile(info)
    for name in ("bin", "lib", "lib64"):
        info = tarfile.TarInfo(name)
        info.type, info.linkname = tarfile.SYMTYPE, f"usr/{name}"
        tar.addfile(info)
    users = b"root:x:0:0:root:/root:/bin/sh\n"
    info = tarfile.TarInfo("etc/passwd")
    info.size = len(users)
    tar.addfile(info, io.BytesIO(users))
    python = Path(sys.executable).resolve()
    modules = [str(path) for path in (Path(sys.base_prefix) / "lib").glob("python3*/lib-dynload/*.so")]
    for file in files:
        tar.add(Path(file).resolve(), f"usr/bin/{Path(file).name}")
    loaded = [str(path) for name in _LOADED for path in Path("/usr/lib").glob(f"*-linux-gnu/{name}")]
    linked = {library for file in (*files, str(python), *modules) for library in _libraries(file)}
    for target, library in {_place_of(library): library for library in sorted({*linked, *loaded})}.items():
        tar.add(Path(library).resolve(), target)


def _place_of(library: str) -> str:
    # A library of this Python's own lies where the image's loader would not look.
    is_systems = library.startswith(("/lib", "/usr"))
    return re.sub("^/(lib|lib64)/", r"usr/\1/", library).lstrip("/") if is_systems else f"usr/lib/{Path(library).name}"


def _add_python(tar: tarfile.TarFile) -> None:
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    prefix = Path(sys.base_prefix)
    tar.add(Path(sys.executable).resolve(), "usr/bin/python3")
    tar.add(
        prefix / "lib" / version,
        f"usr/lib/{version}",
        filter=lambda info: None if _LEFT_OUT.search(f"/{info.name}") else info,
    )


def _libraries(file: str) -> list[str]:
    said = subprocess.run(("ldd", file), check=False, capture_output=True, text=True, timeout=_MAKE_S).stdout
    return re.findall(r"(/\S+) \(0x", said)
