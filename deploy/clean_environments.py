"""Install the release in `dist/` by name in clean environments, and measure what its extras bring.

python deploy/clean_environments.py check DIST     every Python from 3.11 to 3.13 that uv finds
python deploy/clean_environments.py sizes DIST     the table of docs/start.md
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from harness._version import __version__
from harness.cli.installation.probes import DISTRIBUTION, EXTRAS
from harness.machine.program import find_uv

PYTHONS = ("3.11", "3.12", "3.13")
MEGABYTE = 1e6
MEASURE = """
import json
from importlib.metadata import distributions

sizes = {}
for each in distributions():
    paths = [file.locate() for file in each.files or [] if file.suffix != ".pyc"]
    sizes[each.name.lower()] = sum(path.stat().st_size for path in paths if path.is_file())
print(json.dumps(sizes))
"""


def check(dist: Path, pythons: tuple[str, ...] = PYTHONS) -> int:
    """Install and run the release with each Python; return the number of those that are here."""
    missing = [version for version in pythons if not _find_python(version)]
    for version in (each for each in pythons if each not in missing):
        with TemporaryDirectory(prefix="release-") as scratch:
            prefix = _install(dist, Path(scratch), version)
            said = _harness(prefix, "--version")
            if said.strip() != f"harness {__version__}":
                raise SystemExit(f"Python {version}: expected harness {__version__}, got {said.strip()!r}")
            doctor = _harness(prefix, "doctor").splitlines()[0]
            demo = _harness(prefix, "demo").splitlines()
            finished = sum(line.startswith("finished after") for line in demo)
            print(f"Python {version}: {said.strip()}; doctor: {doctor}; demo: {finished} games finished", flush=True)
    if missing:
        print(f"not checked, not on this machine: {', '.join(missing)}")
    return len(pythons) - len(missing)


def sizes(dist: Path) -> None:
    """Print a row of the table for the base install and for what each extra adds to it."""
    base = measure(dist, "")
    print("| | packages | MB | for |\n| --- | --- | --- | --- |")
    print(f"| base | {len(base) - 1} | {sum(base.values()) / MEGABYTE:.0f} | trainers, `serve`, `demo` |")
    for extra, purpose in EXTRAS.items():
        added = {name: size for name, size in measure(dist, extra).items() if name not in base}
        print(f"| `{extra}` | +{len(added)} | +{sum(added.values()) / MEGABYTE:.0f} | {purpose} |", flush=True)


def measure(dist: Path, extra: str) -> dict[str, int]:
    """Return the bytes of each package in an environment with `extra`, compiled files left out."""
    with TemporaryDirectory(prefix="sizes-") as scratch:
        prefix = _install(dist, Path(scratch), f"{sys.version_info.major}.{sys.version_info.minor}", extra)
        measured = subprocess.run([prefix / "bin/python", "-c", MEASURE], capture_output=True, text=True, check=True)
        found: dict[str, int] = json.loads(measured.stdout)
        return found


def _install(dist: Path, scratch: Path, version: str, extra: str = "") -> Path:
    prefix = scratch / "venv"
    name = f"{DISTRIBUTION}[{extra}]" if extra else DISTRIBUTION
    _uv("venv", "--no-config", "--python", version, str(prefix))
    to = ("pip", "install", "--python", str(prefix / "bin/python"))
    # From this folder alone, whatever an index has by that name; then the packages that it needs.
    _uv(*to, "--no-index", "--find-links", str(dist), "--no-deps", f"{DISTRIBUTION}=={__version__}")
    _uv(*to, name)
    return prefix


def _harness(prefix: Path, *arguments: str) -> str:
    outside = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [prefix / "bin/harness", *arguments],
        cwd=prefix,
        env=outside,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"harness {' '.join(arguments)} failed with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def _find_python(version: str) -> bool:
    command = [find_uv(), "python", "find", "--no-python-downloads", version]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _uv(*arguments: str) -> None:
    subprocess.run([find_uv(), *arguments, "--quiet"], check=True, timeout=900)


if __name__ == "__main__":
    _, verb, folder = sys.argv
    if verb == "sizes":
        sizes(Path(folder))
    elif not check(Path(folder)):
        raise SystemExit("expected a Python from 3.11 to 3.13, found none")
