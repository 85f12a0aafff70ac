"""Draw the pictures on the pages of the methods from runs of examples/configs.

python docs/curves.py runs/tiny      draws docs/assets/curves/NAME.png for each run folder in it
"""

import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt

PICTURES = Path(__file__).parent / "assets" / "curves"
# Title of a panel -> names of its metric in training, and of the same on held-out data.
PICTURE_PANELS = {
    "reward": (("reward",), ("eval/eval_sums_pass1",)),
    "loss": (("gpt_loss", "kto_loss", "prm_loss", "loss"), ("eval/kto_loss", "eval/loss")),
    "divergence to the teacher": (("distil_loss",), ()),
    "accuracy": (("acc",), ("eval/acc",)),
    "reward margin": (("reward_margin",), ("eval/reward_margin",)),
    "tokens in a response": (("response_length",), ()),
    "KL": (("kl",), ()),
    "gradient norm": (("actor_grad_norm", "grad_norm"), ()),
}
MAX_COLUMNS = 3
Series = tuple[list[float], list[float]]


def series(records: list[dict[str, float]], names: tuple[str, ...]) -> Series | None:
    """Return steps and values of the first metric that was logged."""
    for name in names:
        if found := [(record["step"], record[name]) for record in records if name in record]:
            steps, values = zip(*found, strict=True)
            return list(steps), list(values)
    return None


def draw(run_dir: Path) -> None:
    """Draw a small picture with a panel for each metric."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    found = {title: [series(records, n) for n in names] for title, names in PICTURE_PANELS.items()}
    shown = {title: both for title, both in found.items() if both[0] is not None}
    columns = min(len(shown), MAX_COLUMNS)
    rows = -(-len(shown) // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(3 * columns, 2.3 * rows), layout="constrained", squeeze=False
    )
    for axis in axes.flat[len(shown) :]:
        axis.set_axis_off()
    for axis, (title, (training, held_out)) in zip(axes.flat, shown.items(), strict=False):
        axis.plot(*training, label="training")
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("step", fontsize=8)
        axis.tick_params(labelsize=8)
        if held_out is not None:
            axis.plot(*held_out, "o--", label="held out")
            axis.legend(fontsize=8)
    figure.savefig(PICTURES / f"{run_dir.name}.png", dpi=90, pil_kwargs={"optimize": True})
    plt.close(figure)


if __name__ == "__main__":
    for path in sorted(Path(sys.argv[1]).glob("*/metrics.jsonl")):
        draw(path.parent)
