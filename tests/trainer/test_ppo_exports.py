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


@WORKERS
@pytest.mark.parametrize("is_slow", [False, True])
def test_an_export_has_the_kind_of_tokenizer_that_the_run_has(
    tiny_model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    worker_class: type[Any],
    is_slow: bool,
) -> None:
    """transformers 5 has one kind only, so that nothing but the question can be looked at."""
    asked: list[bool] = []
    load = transformers.AutoTokenizer.from_pretrained

    def noted(name: str, *, use_fast: bool, trust_remote_code: bool) -> object:
        asked.append(use_fast)
        return load(name, use_fast=use_fast, trust_remote_code=trust_remote_code)

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", noted)
    exported(worker_class, tiny_model_dir, tmp_path, disable_fast_tokenizer=is_slow)
    assert asked == [not is_slow]
