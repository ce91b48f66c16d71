"""Writes the pages that are made from the code and from other pages: `make reference`.

`python docs/site/written.py --check` writes nothing, names the pages that are not what they would be, and exits with 1.
"""

import sys
import tomllib

from commands import commands_page
from failures import errors_page
from pages import ROOT, Page, sections
from support import support_page

DECISIONS = "docs/adr/README.md"


def main(*, only_check: bool) -> int:
    """Exit status: 1 when a page was to be checked and is stale."""
    headed = sections()
    pages = {
        "docs/cli.md": commands_page(),
        "docs/errors.md": errors_page(),
        "docs/support.md": support_page(),
        DECISIONS: decisions_page(headed["Why"]),
        "docs/llms.txt": llms_txt(headed),
    }
    stale = [name for name, text in pages.items() if not _is_current(name, text)]
    if only_check and stale:
        print(f"{', '.join(stale)}: not what the code and the pages say; run: make reference")
        return 1
    for name in stale:
        (ROOT / name).write_text(pages[name], encoding="utf-8")
    return 0


def decisions_page(why: list[Page]) -> str:
    """The list of the decisions."""
    listed = [f"- [{page.title}]({page.path.name})" for page in why if page.path.match("docs/adr/0*.md")]
    return "\n".join(["# Decisions", "", "Where the obvious was not done, and why.", "", *listed]) + "\n"


def llms_txt(headed: dict[str, list[Page]]) -> str:
    """What a program reads first, in the format of llmstxt.org; decisions are what it may leave out."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    optional = [page for pages in headed.values() for page in pages if page.path.match("docs/adr/0*.md")]
    lines = [f"# {project['name']}", "", f"> {project['description']}"]
    for heading, pages in [*headed.items(), ("Optional", optional)]:
        listed = optional if pages is optional else [page for page in pages if page not in optional]
        lines += ["", f"## {heading}", "", *(_line(page) for page in listed)]
    return "\n".join(lines) + "\n"


def _line(page: Page) -> str:
    link = page.path.relative_to("docs") if page.path.is_relative_to("docs") else f"../{page.path}"
    return f"- [{page.title}]({link})" + (f": {page.says}" if page.says else "")


def _is_current(name: str, text: str) -> bool:
    file = ROOT / name
    return file.exists() and file.read_text(encoding="utf-8") == text


if __name__ == "__main__":
    sys.exit(main(only_check="--check" in sys.argv[1:]))
