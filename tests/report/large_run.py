"""A run with 100,000 samples, and the server of the report in a thread."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import uvicorn

from openrlhf.report.server import make_app
from tests.report.run_folders import training_record, write_metrics

NUM_FILES, NUM_GROUPS, GROUP_SIZE = 100, 125, 8
NUM_ROWS = NUM_GROUPS * GROUP_SIZE
NUM_TOKENS = 100  # on average


def words(rng: np.random.Generator, count: int) -> str:
    letters = rng.choice(list("etaoinshrdlu"), (count, 6))
    return " ".join("".join(word[: 2 + i % 5]) for i, word in enumerate(letters))


def excerpts(rng: np.random.Generator, text: str, count: int) -> list[str]:
    starts, lengths = rng.integers(0, len(text) - 800, count), rng.integers(300, 800, count)
    return [text[start : start + length] for start, length in zip(starts, lengths, strict=True)]


def token_columns(rng: np.random.Generator) -> dict[str, pyarrow.ListArray]:
    lengths = rng.integers(NUM_TOKENS // 2, NUM_TOKENS * 3 // 2, NUM_ROWS)
    offsets, count = np.concatenate([[0], np.cumsum(lengths)]), lengths.sum()
    ids = rng.integers(0, 5000, count)
    flat = {"token_ids": ids, "token_texts": np.char.mod(" t%d", np.arange(5000))[ids]}
    flat |= {"action_mask": np.full(count, True), "weight_versions": np.full(count, 3)}
    for name in ("logprobs", "old_logprobs", "new_logprobs", "advantages"):
        flat[name] = rng.normal(size=count).astype(np.float32)
    return {n: pyarrow.ListArray.from_arrays(offsets, v.tolist()) for n, v in flat.items()}


def write_large_run(path: Path) -> Path:
    rng = np.random.default_rng(0)
    text, tokens = words(rng, 100_000), token_columns(rng)
    write_metrics(path, [training_record(step, 0) for step in range(1, NUM_FILES + 1)])
    (path / "rollouts").mkdir()
    for step in range(1, NUM_FILES + 1):
        group = np.repeat(np.arange(NUM_GROUPS), GROUP_SIZE)
        prompts = excerpts(rng, text, NUM_GROUPS)
        columns = {
            "sample_id": [f"{step}-{i}" for i in range(NUM_ROWS)],
            "row": group + step * NUM_GROUPS,
            "group_id": group,
            "prompt": [prompts[i] for i in group],
            "response": excerpts(rng, text, NUM_ROWS),
            "label": [str(i) for i in group],
            "datasource": ["sums"] * NUM_ROWS,
            "reward": (37 * np.arange(NUM_ROWS) + step) % 1000 / 1000,
            "reward_parts": [json.dumps({"format": 0.125, "answer": 1.0})] * NUM_ROWS,
            "advantage": rng.normal(size=NUM_ROWS),
            "num_actions": rng.integers(50, 150, NUM_ROWS),
            "finish_reason": ["stop"] * NUM_ROWS,
            "weight_version": [step - 1] * NUM_ROWS,
        }
        table = pyarrow.table({**columns, **tokens})
        pyarrow.parquet.write_table(table, path / "rollouts" / f"step_{step:06d}.parquet")
    return path


@contextmanager
def served(paths: list[Path]) -> Iterator[str]:
    """The address of a server of these runs."""
    server = uvicorn.Server(uvicorn.Config(make_app(paths), port=0, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.02)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/"
    finally:
        server.should_exit = True
        thread.join()
