"""Models that PPO trains are exported with the run's tokenizer, as the flags changed it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers

from openrlhf.config.ppo import PPOConfig
from openrlhf.trainer.ray.model_actor import RankIdentity
from openrlhf.trainer.ray.ppo_actor import PolicyModelActor
from openrlhf.trainer.ray.ppo_critic import CriticModelActor

TEMPLATE = "{% for message in messages %}<{{ message.content }}>{% endfor %}"
WORKERS = pytest.mark.parametrize("worker_class", [PolicyModelActor, CriticModelActor])


def exported(worker_class: type[Any], model: Path, folder: Path, **data: object) -> str:
    """Where a worker of a run with these settings of its data has written its model."""
    sections = {
        "actor": {"model_name_or_path": str(model)},
        "ds": {"zero_stage": 0},
        "data": data,
    }
    worker = worker_class(
        PPOConfig.model_validate(sections), RankIdentity("role", 0, 1, str(folder))
    )
    worker.setup()
    worker.init_model(num_updates=1)
    worker.save_model(str(folder / "export"))
    return str(folder / "export")


@WORKERS
def test_an_export_has_the_chat_template_of_the_run(
    tiny_model_dir: Path, tmp_path: Path, worker_class: type[Any]
) -> None:
    path = exported(worker_class, tiny_model_dir, tmp_path, tokenizer_chat_template=TEMPLATE)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    assert tokenizer.chat_template == TEMPLATE
