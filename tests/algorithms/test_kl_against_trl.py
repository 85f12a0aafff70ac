"""The gradient of KL as a loss, compared with TRL's `use_bias_correction_kl`."""

from __future__ import annotations

from pathlib import Path

import torch

from openrlhf.algorithms.kl import kl_per_token, with_reverse_kl_gradient

PROMPTS = torch.tensor([[5, 6, 7], [8, 9, 10]])
COMPLETIONS = torch.tensor([[11, 12, 13, 14], [15, 16, 17, 18]])
OLD = torch.tensor([[-5.0, -6.0, -5.5, -7.0], [-6.5, -5.0, -6.0, -5.8]])
REF = torch.tensor([[-6.0, -5.0, -6.5, -5.0], [-5.5, -7.0, -5.0, -6.0]])


def trl_gradient(model_dir: Path, folder: Path) -> torch.Tensor:
    """Gradient of TRL's loss where advantages are 0: the KL term with coefficient 1 alone."""
    import trl
    from datasets import Dataset

    config = trl.GRPOConfig(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        beta=1.0,
        use_bias_correction_kl=True,
        loss_type="grpo",
        per_device_train_batch_size=2,
        num_generations=2,
        max_completion_length=4,
        report_to=[],
    )
    trainer = trl.GRPOTrainer(
        model=str(model_dir),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=config,
        train_dataset=Dataset.from_dict({"prompt": ["a", "b"]}),
    )
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    inputs = {
        "prompt_ids": PROMPTS,
        "prompt_mask": torch.ones_like(PROMPTS),
        "completion_ids": COMPLETIONS,
        "completion_mask": torch.ones_like(COMPLETIONS),
        "advantages": torch.zeros(2),
        "old_per_token_logps": OLD,
        "ref_per_token_logps": REF,
        "num_items_in_batch": torch.tensor(8),
    }
    trainer.compute_loss(trainer.model, inputs).backward()
    return flat_gradient(trainer.model)


def flat_gradient(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for _, p in sorted(model.named_parameters())])


def own_gradient(model_dir: Path, estimator: str) -> torch.Tensor:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype="float32")
    logits = model(torch.cat([PROMPTS, COMPLETIONS], 1)).logits[:, 2:-1]
    logprobs = logits.log_softmax(-1).gather(-1, COMPLETIONS[..., None])[..., 0]
    kl = kl_per_token(logprobs, REF, estimator=estimator)
    with_reverse_kl_gradient(kl, logprobs, OLD, REF).mean().backward()
    return flat_gradient(model)


def test_the_unbiased_kl_gradient_is_that_of_trl(tiny_model_dir, tmp_path, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):  # of trainers that ran in this process
        monkeypatch.delenv(name, raising=False)
    expected = trl_gradient(tiny_model_dir, tmp_path)
    assert expected.norm() > 1e-2
    for estimator in ("k1", "k3"):
        error = own_gradient(tiny_model_dir, estimator) - expected
        assert error.norm() / expected.norm() < 1e-5, estimator
