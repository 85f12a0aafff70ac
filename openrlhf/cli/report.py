"""`openrlhf report RUN [RUN...]`: what happened in runs, as one HTML page."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from openrlhf.cli.runner import Command, show
from openrlhf.config.serving import ReportConfig


def load(config: ReportConfig) -> Callable[[], None]:
    """Return the function that writes or serves the report."""
    paths = [Path(run).expanduser() for run in config.runs]
    if config.serve:
        from openrlhf.report.server import serve  # noqa: PLC0415 - --help needs no server

        return partial(serve, paths, config.port, say=show)
    return partial(write, paths, config.output_path)


def write(paths: Sequence[Path], output: str | None) -> None:
    """Write the files and print where they are."""
    from openrlhf.report.page import results  # noqa: PLC0415 - as above
    from openrlhf.report.report import picture_path, write_report  # noqa: PLC0415
    from openrlhf.utils.run_folder import REPORT_FILE  # noqa: PLC0415

    default = paths[0] / REPORT_FILE if len(paths) == 1 else Path(REPORT_FILE)
    path = Path(output) if output else default
    for run in write_report(paths, path):
        for name, text in results(run).items():
            show(f"{run.name}: {name} {text}")
        for words in run.outcome():
            show(f"{run.name}: hint: {words}")
    show(f"report: {path}")
    show(f"curves: {picture_path(path)}")


main = Command("openrlhf report", ReportConfig, load)

if __name__ == "__main__":
    main()
