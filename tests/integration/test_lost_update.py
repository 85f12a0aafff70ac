"""The second of two real engines does not get an update: the run ends with that sync, before the
step after it, and says which engine it was.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from openrlhf.cli import train_ppo_ray
from openrlhf.engines.base import SyncReceipt, WeightBucket
from openrlhf.trainer.ray import vllm_engine
from openrlhf.trainer.ray.vllm_engine import LLMRayActor
from openrlhf.utils.tracking import read_metrics
from tests.integration.commands import argv

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

FLAGS = (
    "--advantage_estimator group_norm --init_kl_coef 0 --n_samples_per_prompt 2 "
    "--vllm_num_engines 2 --enforce_eager --actor_learning_rate 1e-3"
)
LOST_VERSION = 1  # what the first step made; version 0 is sent before it


class EngineOfTwo(LLMRayActor):
    """An engine that knows which one it is, and whether the update is the one that gets lost."""

    def __init__(self, config: Any, name: str, run_dir: str) -> None:
        super().__init__(config, name, run_dir)
        self.is_second = name == "vllm-1"
        self.num_begun = 0

    @property
    def is_lost(self) -> bool:
        return self.is_second and self.num_begun == LOST_VERSION + 1

    def begin_weight_update(self, *, keep_running: bool = False) -> None:
        self.num_begun += 1
        super().begin_weight_update(keep_running=keep_running)


class MissesBuckets(EngineOfTwo):
    """What is sent does not reach it."""

    def receive_bucket(self, bucket: WeightBucket) -> None:
        if not self.is_lost:
            super().receive_bucket(bucket)


class MissesUpdates(EngineOfTwo):
    """It was never told that there is an update, and answers what it holds."""

    receipt: SyncReceipt | None = None

    def begin_weight_update(self, *, keep_running: bool = False) -> None:
        self.num_begun += 1
        if not self.is_lost:
            LLMRayActor.begin_weight_update(self, keep_running=keep_running)

    def receive_bucket(self, bucket: WeightBucket) -> None:
        if not self.is_lost:
            super().receive_bucket(bucket)

    def finish_weight_update(self, weight_version: int) -> SyncReceipt:
        if not self.is_lost:
            self.receipt = super().finish_weight_update(weight_version)
        assert self.receipt is not None
        return self.receipt


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        (MissesBuckets, "incomplete update: "),
        (MissesUpdates, "holds weight version 0, sent 1"),
    ],
)
@pytest.mark.parametrize("flags", ["", "--async_train"], ids=["sync", "async"])
def test_an_update_that_one_engine_did_not_get_ends_the_run_by_its_name(
    ray_cluster: None,
    tiny_model_dir: Path,
    prompt_file: Path,
    reward_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    engine: type[EngineOfTwo],
    message: str,
    flags: str,
) -> None:
    monkeypatch.setattr(vllm_engine, "LLMRayActor", engine)
    with pytest.raises(SystemExit) as stop:
        train_ppo_ray.main(
            argv(
                f"{FLAGS} {flags}",
                pretrain=tiny_model_dir,
                prompt_data=prompt_file,
                remote_rm_url=reward_file,
                label_key="answer",
                save_path=tmp_path / "run",
            )
        )
    assert stop.value.code == 3
    [line] = [x for x in capsys.readouterr().err.splitlines() if x.startswith("error: ")]
    assert "vllm-1 on node " in line and "vllm-0" not in line
    assert message in line
    path = tmp_path / "run" / "metrics.jsonl"
    steps = read_metrics(path) if path.exists() else []
    assert not [step for step in steps if step["step"] > LOST_VERSION]
