"""The curves of runs as a picture, by matplotlib."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from openrlhf.report.curves import Curve, Panel

NUM_COLUMNS = 3
MAX_PANELS = 6
SIZE = (4.0, 2.8)  # inches of a panel


def draw_curves(panels: Sequence[Panel], path: Path) -> None:
    """Draw the first panels to a PNG."""
    shown = [panel for panel in panels if panel.section == "curves"][:MAX_PANELS]
    num_rows = max(-(-len(shown) // NUM_COLUMNS), 1)
    num_columns = min(max(len(shown), 1), NUM_COLUMNS)
    figure = Figure((SIZE[0] * num_columns, SIZE[1] * num_rows))
    for index, panel in enumerate(shown):
        axis = figure.add_subplot(num_rows, num_columns, index + 1)
        _draw(axis, panel)
    # tight_layout would draw everything once more to measure it.
    figure.subplots_adjust(0.06, 0.06, 0.98, 0.95, wspace=0.22, hspace=0.3)
    FigureCanvasAgg(figure).print_png(path)


def _draw(axis: Axes, panel: Panel) -> None:
    num_runs = len({curve.run for curve in panel.curves})
    metrics = {curve.metric for curve in panel.curves}
    for curve in panel.curves:
        names = ([curve.run] if num_runs > 1 else []) + ([curve.metric] if len(metrics) > 1 else [])
        _draw_curve(axis, curve, " ".join(names) or curve.metric)
    axis.set_title(panel.title, fontsize="medium")
    axis.tick_params(labelsize="small")
    axis.locator_params(nbins=5)
    if num_runs > 1 or len(metrics) > 1:
        axis.legend(fontsize="x-small")


def _draw_curve(axis: Axes, curve: Curve, label: str) -> None:
    values = [float("nan") if value is None else value for value in curve.values]
    style = "o--" if curve.is_evaluation else "-"
    if curve.errors is None:
        axis.plot(curve.steps, values, style, markersize=3, label=label)
    else:
        errors = [error or 0.0 for error in curve.errors]
        axis.errorbar(curve.steps, values, errors, fmt=style, markersize=3, label=label)
