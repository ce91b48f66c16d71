"""Builds the site of the documentation: `python docs/site/build.py FOLDER` (`make docs`).

The pages are laid out as the repository has them, so that a link that works there works here, and the public names get
a page from their docstrings. Each page is there as Markdown too, for programs that read `docs/llms.txt`. npm fetches
the one script that makes the search work in a folder; a reader fetches nothing. Every warning is an error: a page that
docs/README.md leaves out, a link or an anchor that leads nowhere.
"""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import yaml
from pages import INDEX, ROOT, sections

AROUND = (
    *("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "AGENTS.md", "LICENSE", "agents/README.md"),
    *sorted(str(page.relative_to(ROOT)) for page in (ROOT / "examples").glob("*/README.md")),
)
API = "docs/api.md"
SHIM = "iframe-worker@1.0.4"  # MIT
PUBLIC_NAMES = "docs/public-names.md"
LAST_FOUND = ("CHANGELOG.md", "CONTRIBUTING.md", "AGENTS.md", "docs/README.md", PUBLIC_NAMES)
"""Pages that have most words somewhere, and are seldom the answer of a search; decisions are others."""
_CODE = re.compile(r"`[^`\n]+`")


def main(site: Path) -> int:
    """The exit status of mkdocs, which writes into `site`."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        lay_out(folder / "pages")
        (folder / "mkdocs.yml").write_text(configuration(), encoding="utf-8")
        command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(folder / "mkdocs.yml")]
        quiet = {"NO_MKDOCS_2_WARNING": "1"}  # that mkdocs 2 will be another program is said in pyproject.toml
        done = subprocess.run(
            [*command, "--site-dir", str(site.resolve())], check=False, cwd=ROOT, env=os.environ | quiet
        )
        for page in (folder / "pages").rglob("*.md"):
            shutil.copyfile(page, site / page.relative_to(folder / "pages"))
    return done.returncode


def lay_out(pages: Path) -> None:
    """The sources of the site, in `pages`."""
    shutil.copytree(ROOT / "docs", pages / "docs", ignore=shutil.ignore_patterns("site"))
    fetch_shim(pages / "iframe-worker")
    for name in AROUND:
        (pages / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, pages / name)
    for page in pages.rglob("*.md"):
        page.write_text(_CODE.sub(_bare_bars, page.read_text(encoding="utf-8")), encoding="utf-8")
    api = (ROOT / API).read_text(encoding="utf-8")
    (pages / PUBLIC_NAMES).write_text(public_names(api), encoding="utf-8")
    for page in [*(pages / name for name in LAST_FOUND), *pages.glob("docs/adr/*.md")]:
        page.write_text(f"---\nsearch:\n  boost: 0.2\n---\n{page.read_text(encoding='utf-8')}", encoding="utf-8")


def fetch_shim(folder: Path) -> None:
    """Put `shim.js` into `folder`: Material's search without a server needs it, and asks unpkg.com for it otherwise."""
    folder.mkdir()
    subprocess.run(["npm", "pack", "--silent", SHIM], check=True, cwd=folder, stdout=subprocess.DEVNULL)
    [archive] = folder.glob("*.tgz")
    with tarfile.open(archive) as files:
        script = files.extractfile("package/shim/index.js")
        assert script is not None
        (folder / "shim.js").write_bytes(script.read())
    archive.unlink()


def _bare_bars(code: re.Match[str]) -> str:
    """Without the backslash that GitHub wants before a bar in the code of a table, and mkdocs would show."""
    return code[0].replace("\\|", "|")


def public_names(api: str) -> str:
    """The page with the docstrings of all names of docs/api.md, under its headings."""
    lines = ["# Public names", "", "Signatures and docstrings of what [Python](api.md) lists."]
    door = "harness"
    for line in api.splitlines():
        if line.startswith("## "):
            lines += ["", line]
            door = "harness.training" if line == "## Training" else "harness"
        elif row := re.match(r"- ((?:`\w+`[,:] ?)+)", line):
            lines += [text for name in re.findall(r"`(\w+)`", row[1]) for text in ("", f"::: {door}.{name}")]
    return "\n".join(lines) + "\n"


def configuration() -> str:
    """`mkdocs.yml` with the navigation of the index."""
    nav: list[dict[str, object]] = [{"All pages": INDEX.as_posix()}]
    for heading, pages in sections().items():
        paths = [page.path.as_posix() for page in pages]
        if API in paths:
            paths.insert(paths.index(API) + 1, PUBLIC_NAMES)
        decisions = [path for path in paths if path.startswith("docs/adr/")]
        others = [path for path in paths if path not in decisions]
        nav.append({heading: [*others, {"Decisions": decisions}] if decisions else paths})
    settings = (Path(__file__).parent / "mkdocs.yml").read_text(encoding="utf-8")
    return settings + yaml.safe_dump({"nav": nav})


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
