"""The charts of a report as SVG, by matplotlib (extra `plots`). Equal charts give equal bytes."""

from collections.abc import Sequence
from io import BytesIO

from harness.errors import RunError
from harness.viewer.damaged_run import say_missing
from harness.viewer.report import Chart

_BARS = 20
_NAME = 40  # characters


def draw(charts: Sequence[Chart], missing: list[str]) -> list[tuple[str, bytes]]:
    """Return the title and picture of each chart; failures go to `missing`. Raises `RunError` without matplotlib."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RunError(f"--plots needs matplotlib ({error}): pip install 'session-harness[plots]'") from None
    pictures: list[tuple[str, bytes]] = []
    for chart in charts:
        with (
            say_missing(f"the chart {chart.title}", missing),
            rc_context({"svg.hashsalt": "harness", "svg.fonttype": "path"}),
        ):
            figure = Figure(figsize=(6, 3), layout="constrained")
            axes = figure.subplots()
            if chart.bars:
                bars = list(chart.bars.items())[:_BARS]
                axes.barh([_plain(name) for name, _ in bars], [count for _, count in bars])
                axes.invert_yaxis()
            else:
                axes.hist(chart.values, bins=20)
                axes.set_ylabel("count")
            axes.set_xlabel(chart.label)
            axes.set_title(_plain(chart.title))
            file = BytesIO()
            figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
            pictures.append((chart.title, file.getvalue()))
    return pictures


def _plain(name: str) -> str:
    # ASCII, because fonts lack other characters. `$` would begin a formula.
    return ascii(name)[1:-1][:_NAME].replace("$", r"\$")
