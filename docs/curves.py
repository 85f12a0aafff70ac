"""Draw the pictures on the pages of the methods from runs of examples/configs.

python docs/curves.py runs/tiny      draws docs/assets/curves/NAME.png for each run folder in it
"""

import sys
from pathlib import Path

import matplotlib.pyplot as plt

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples" / "python"))
from plot_run import held_out_name, panels, read_records, series

PICTURES = Path(__file__).parent / "assets" / "curves"
LEFT_OUT = "learning rate"
MAX_COLUMNS = 3


def draw(run_dir: Path) -> None:
    """Draw a small picture with a panel for each metric."""
    records = read_records(run_dir)
    shown = {title: name for title, name in panels(records).items() if title != LEFT_OUT}
    columns = min(len(shown), MAX_COLUMNS)
    rows = -(-len(shown) // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(3 * columns, 2.3 * rows), layout="constrained", squeeze=False
    )
    for axis in axes.flat[len(shown) :]:
        axis.set_axis_off()
    for axis, (title, name) in zip(axes.flat, shown.items(), strict=False):
        axis.plot(*series(records, name), label="training")
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("step", fontsize=8)
        axis.tick_params(labelsize=8)
        if (evaluated := held_out_name(records, name)) is not None:
            axis.plot(*series(records, evaluated), "o--", label="held out")
            axis.legend(fontsize=8)
    figure.savefig(PICTURES / f"{run_dir.name}.png", dpi=90, pil_kwargs={"optimize": True})
    plt.close(figure)


if __name__ == "__main__":
    for path in sorted(Path(sys.argv[1]).glob("*/metrics.jsonl")):
        draw(path.parent)
