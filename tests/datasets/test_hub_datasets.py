"""Names of the hub, with configurations, folders and splits, through the client that users have."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.datasets.hub_stub import serving

CARD = b"""---
configs:
- config_name: easy
  default: true
  data_files:
  - split: train
    path: easy/train.jsonl
- config_name: hard
  data_files:
  - split: train
    path: hard/train.jsonl
  - split: test
    path: hard/test.jsonl
---
"""
REPOSITORIES = {
    "org/sums": {
        "README.md": CARD,
        "easy/train.jsonl": b'{"prompt": "1+1", "completion": "2"}\n',
        "hard/train.jsonl": b'{"prompt": "17*3", "completion": "51"}\n',
        "hard/test.jsonl": b'{"prompt": "19*3", "completion": "57"}\n',
    },
    "org/words": {
        "en/train.csv": b"prompt,completion\na,b\n",
        "de/train.csv": b"prompt,completion\nc,d\ne,f\n",
    },
    "org/torn": {"train.jsonl": b'{"prompt": "a"}\n{"prompt'},
}
READ = """
import json, sys
from openrlhf.datasets.loading import load_rows
from openrlhf.errors import ConfigError
for line in sys.stdin:
    options = json.loads(line)
    try:
        print("=", json.dumps(load_rows(**options)["prompt"][:]))
    except ConfigError as error:
        print("=", json.dumps(str(error)))
"""
SUMS = ["1+1", "17*3", "19*3"]
CASES = [
    ({"spec": "org/sums"}, SUMS[:1]),
    ({"spec": "org/sums@hard"}, SUMS[1:2]),
    ({"spec": "org/sums@hard", "split": "test"}, SUMS[2:]),
    ({"spec": "org/words@de"}, ["c", "e"]),
    ({"spec": "org/sums,org/words@de", "max_samples": 2}, ["1+1", "c"]),
    ({"spec": "org/sums,org/sums@hard", "probs": "0.5,0.5"}, None),
    ({"spec": "org/sums@hard", "split": "dev"}, "org/sums@hard cannot be loaded from the hub"),
    ({"spec": "org/none"}, "data set org/none cannot be loaded from the hub"),
    ({"spec": "org/torn"}, "data set org/torn cannot be loaded from the hub (split 'train'): "),
]


@pytest.mark.slow
def test_names_of_the_hub_are_read_by_configuration_folder_and_split(tmp_path: Path) -> None:
    questions = "".join(json.dumps(options) + "\n" for options, _ in CASES)
    with serving(REPOSITORIES) as endpoint:
        env = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path)}
        env |= {"HF_HUB_OFFLINE": "0", "HF_DATASETS_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
        done = subprocess.run(
            [sys.executable, "-c", READ],
            input=questions,
            env=env,
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
    lines = [line[2:] for line in done.stdout.splitlines() if line.startswith("= ")]
    assert len(lines) == len(CASES), done.stderr
    for (options, expected), line in zip(CASES, lines, strict=True):
        found = json.loads(line)
        if isinstance(expected, str):
            assert isinstance(found, str) and expected in found and "\n" not in found, options
        elif expected is None:
            assert set(found) <= set(SUMS) and found, options
        else:
            assert found == expected, options
