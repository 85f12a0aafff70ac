"""The curves of runs as a picture, by matplotlib."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from openrlhf.report.curves import Curve, Panel

NUM_COLUMNS = 3
MAX_PANELS = 6
SIZE = (4.0, 2.8)  # inches of a panel
MAX_LABEL = 18  # characters of a name, of which two fit side by side in a legend
MAX_LEGEND = 0.8  # of the height of a panel
MARKERS = "osv^D*"  # of metrics, where the colour is the run's


def draw_curves(panels: Sequence[Panel], path: Path) -> None:
    """Draw the first panels to a PNG. A run has one colour; a run alone has one for each metric."""
    shown = [panel for panel in panels if panel.section == "curves"][:MAX_PANELS]
    runs = list(dict.fromkeys(curve.run for panel in panels for curve in panel.curves))
    num_rows = max(-(-len(shown) // NUM_COLUMNS), 1)
    num_columns = min(max(len(shown), 1), NUM_COLUMNS)
    figure = Figure((SIZE[0] * num_columns, SIZE[1] * num_rows))
    # tight_layout would draw everything once more to measure it.
    figure.subplots_adjust(0.06, 0.06, 0.98, 0.95, wspace=0.22, hspace=0.3)
    for index, panel in enumerate(shown):
        axis = figure.add_subplot(num_rows, num_columns, index + 1)
        _draw(axis, panel, runs)
    FigureCanvasAgg(figure).print_png(path)


def _draw(axis: Axes, panel: Panel, runs: Sequence[str]) -> None:
    metrics = list(dict.fromkeys(curve.metric for curve in panel.curves))
    owners = runs if len(runs) > 1 else metrics
    colours = {owner: f"C{index}" for index, owner in enumerate(owners)}
    markers = {metric: MARKERS[index % len(MARKERS)] for index, metric in enumerate(metrics)}
    for curve in panel.curves:
        colour = colours[curve.run if len(runs) > 1 else curve.metric]
        _draw_curve(axis, curve, colour, markers[curve.metric])
    axis.set_title(panel.title, fontsize="medium")
    axis.tick_params(labelsize="small")
    axis.locator_params(nbins=5)
    names = [Line2D([], [], color=colours[run], label=run) for run in runs if run in colours]
    if len(metrics) > 1:
        styles = {curve.metric: _style(curve, markers[curve.metric]) for curve in panel.curves}
        names += [
            Line2D([], [], color=colours.get(metric, "grey"), label=metric, **styles[metric])
            for metric in metrics
        ]
    if len(names) > 1:
        _add_legend(axis, names)


def _add_legend(axis: Axes, names: Sequence[Line2D]) -> None:
    """Add a legend at the top, and move the curves below it."""
    are_short = max(len(str(name.get_label())) for name in names) <= MAX_LABEL
    legend = axis.legend(
        handles=names, loc="upper center", ncols=2 if are_short else 1, fontsize="x-small"
    )
    extent, (low, high) = legend.get_window_extent(), axis.get_ylim()
    share = min((axis.bbox.y1 - extent.y0) / axis.bbox.height, MAX_LEGEND)
    axis.set_ylim(low, low + (high - low) / (1 - share))


def _style(curve: Curve, marker: str) -> dict[str, Any]:
    """Return the style of a line: an evaluation is dashed and has points."""
    shown = {"linestyle": "--", "marker": marker} if curve.is_evaluation else {"linestyle": "-"}
    return {**shown, "markersize": 3}


def _draw_curve(axis: Axes, curve: Curve, colour: str, marker: str) -> None:
    values = [float("nan") if value is None else value for value in curve.values]
    style = _style(curve, marker)
    if curve.errors is None:
        axis.plot(curve.steps, values, color=colour, **style)
    else:
        errors = [error or 0.0 for error in curve.errors]
        axis.errorbar(curve.steps, values, errors, color=colour, **style)
