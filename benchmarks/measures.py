"""One measurement a process: `python -m benchmarks.measures NAME FOLDER [MAX_NEW_TOKENS]` prints
one JSON object.

Each side of a ratio runs alone in a fresh process with the same threads; `benchmarks.run`
alternates them. The two sides of training take turns in one process: they differ by less than two
processes do.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch

from benchmarks import workload as w

REPEATS = 5
TURNS = 7  # of both sides of training
MAX_TOKENS_PER_GPU = {64: 1024, 256: 2048}  # of a micro-batch of `training`: the fastest of each
Measurement = dict[str, float]


def seconds(call: Callable[[], object], *, repeats: int = REPEATS, warm_up: int = 2) -> float:
    """Median wall seconds of a call after warming up."""
    for _ in range(warm_up):
        call()
    times = []
    for _ in range(repeats):
        start = time.monotonic()
        call()
        times.append(time.monotonic() - start)
    return statistics.median(times)


def num_steps_of(work: w.Workload) -> int:
    """Steps of a run; two of them warm up."""
    return 7 if work.max_new_tokens <= 64 else 5


def _plain_llm(work: w.Workload) -> object:
    """vllm.LLM with the engine settings that ours has."""
    import os

    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    import vllm

    return vllm.LLM(
        str(work.model),
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        distributed_executor_backend="uni",
        max_model_len=max(w.PROMPT_TOKENS) + work.max_new_tokens,
        kv_cache_memory_bytes=1 << 30,
    )


def generate_plain(work: w.Workload) -> Measurement:
    """vllm.LLM.generate on the same requests: the same engine settings, nothing of ours."""
    llm = _plain_llm(work)
    import vllm

    params = vllm.SamplingParams(
        n=w.NUM_SAMPLES,
        max_tokens=work.max_new_tokens,
        ignore_eos=True,
        detokenize=False,
        logprobs=0,
    )
    prompts = [{"prompt_token_ids": ids} for ids in w.prompt_token_ids()]
    took = seconds(lambda: llm.generate(prompts, params, use_tqdm=False))
    return {"seconds": took, "tokens": work.num_completions * work.max_new_tokens}


def _requests(work: w.Workload) -> list:
    from openrlhf.engines.base import GenerationRequest, SamplingSettings

    sampling = SamplingSettings(num_samples=w.NUM_SAMPLES, max_new_tokens=work.max_new_tokens)
    return [
        GenerationRequest(str(i), tuple(ids), sampling)
        for i, ids in enumerate(w.prompt_token_ids())
    ]


def generate_vllm(work: w.Workload) -> Measurement:
    """Our engine on vLLM."""
    from openrlhf.engines.vllm_engine import VLLMEngine

    engine = VLLMEngine(
        {
            "model": str(work.model),
            "dtype": "float32",
            "max_model_len": max(w.PROMPT_TOKENS) + work.max_new_tokens,
            "max_num_seqs": 256,
            "enable_prefix_caching": True,
        }
    )
    requests = _requests(work)
    took = seconds(lambda: engine.generate(requests))
    return {"seconds": took, "tokens": work.num_completions * work.max_new_tokens}


def generate_hf(work: w.Workload) -> Measurement:
    """Our engine on the policy itself (--vllm_num_engines 0)."""
    from openrlhf.engines.own_generate import OwnGenerate
    from openrlhf.models.loading import load_causal_lm

    engine = OwnGenerate(load_causal_lm(work.model))
    requests = _requests(work)
    took = seconds(lambda: engine.generate(requests))
    return {"seconds": took, "tokens": work.num_completions * work.max_new_tokens}


def bare_loop(work: w.Workload) -> Callable[[], object]:
    """Forward, backward and AdamW in plain torch and transformers: the samples of a prompt, which
    are of one length, in a micro-batch.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(work.model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    groups, n = w.groups_to_train_on(work), work.max_new_tokens

    def step() -> None:
        for rows in groups:
            logits = model(input_ids=rows, use_cache=False).logits[:, -n - 1 : -1]
            loss = torch.nn.functional.cross_entropy(
                logits.float().flatten(0, 1), rows[:, -n:].flatten(), reduction="sum"
            )
            (loss / (work.num_completions * n)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _policy(work: w.Workload, folder: Path, *, zero_stage: int = 2) -> object:
    from openrlhf.config.ppo import PPOConfig
    from openrlhf.trainer.workers.policy import PolicyModelActor

    max_tokens = MAX_TOKENS_PER_GPU.get(work.max_new_tokens, 2048)
    config = PPOConfig.model_validate(
        {
            "actor": {"model_name_or_path": str(work.model)},
            "rollout": {"max_new_tokens": work.max_new_tokens},
            "train": {"dynamic_batch_enable": True, "max_tokens_per_gpu": max_tokens},
            "ds": {"zero_stage": zero_stage},
        }
    )
    actor = PolicyModelActor(config, "actor", str(folder))
    actor.setup()
    actor.init_model(1000)
    return actor


def policy_update(work: w.Workload) -> Callable[[], object]:
    """The policy's update on the same rows: packed, DeepSpeed, PPO loss on the response tokens."""
    from openrlhf.trainer.ppo_utils.update_plan import plan_updates, update_shares

    actor, experience = _policy(work, work.model.parent), _experience(work)
    size = work.num_completions
    plan = plan_updates(experience, 1, train_batch_size=size, max_epochs=1, seed=0)
    [steps] = update_shares(experience, plan)
    return partial(actor.fit, steps)


def training(work: w.Workload) -> Measurement:
    """The bare loop and the policy's update in turns; two of each warm up."""
    calls = {"bare": bare_loop(work), "seconds": policy_update(work)}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(2 + TURNS):
        for name, call in calls.items():
            start = time.monotonic()
            call()
            times[name].append(time.monotonic() - start)
    return {name: statistics.median(each[2:]) for name, each in times.items()}


def _experience(work: w.Workload) -> object:
    from openrlhf.trainer.ppo_utils.experience import Experience
    from openrlhf.utils.rollout import Rollout, sequence_tensors

    rollouts, n = [], work.max_new_tokens
    rows = [row for group in w.groups_to_train_on(work) for row in group.tolist()]
    for i, row in enumerate(rows):
        token_ids, mask = sequence_tensors(row[:-n], row[-n:])
        rollouts.append(
            Rollout(
                sample_id=str(i),
                group_id=i // w.NUM_SAMPLES,
                row_id=i // w.NUM_SAMPLES,
                token_ids=token_ids,
                action_mask=mask,
                logprobs=torch.full((n,), -7.6),
                weight_versions=torch.zeros(n, dtype=torch.int32),
                finish_reason="length",
                prompt_text="",
                response_text="",
                reward=float(i % 3),
            )
        )
    experience = Experience.from_rollouts(rollouts).laid_out()
    noise = torch.randn(
        len(experience.rollout_logprobs), generator=torch.Generator().manual_seed(0)
    )
    return replace(experience, advantages=noise)


def memory_copy(work: w.Workload) -> Measurement:
    """Copying the model's weights once, tensor by tensor, into memory that is already there."""
    from safetensors.torch import load_file

    tensors = list(load_file(work.model / "model.safetensors").values())
    targets = [torch.empty_like(t) for t in tensors]

    def copy() -> None:
        for target, tensor in zip(targets, tensors, strict=True):
            target.copy_(tensor)

    num_bytes = sum(t.nbytes for t in tensors)
    return {"seconds": seconds(copy, repeats=20), "bytes": num_bytes}


def weight_sync(work: w.Workload) -> Measurement:
    """Trainer to vLLM engine with buckets, fingerprints and receipt, both in this process."""
    from openrlhf.engines.vllm_engine import VLLMEngine

    actor = _policy(work, work.model.parent)
    engine = VLLMEngine({"model": str(work.model), "dtype": "float32", "max_model_len": 64})
    broadcast = partial(actor.broadcast_to_vllm, [engine])
    return {"seconds": seconds(broadcast, repeats=20, warm_up=5)}


def vllm_reload(work: w.Workload) -> Measurement:
    """vLLM's own layerwise reload of tensors that are at hand: no transfer, no proof."""
    from safetensors.torch import load_file

    llm = _plain_llm(work)
    from vllm.model_executor.model_loader import reload

    tensors = load_file(work.model / "model.safetensors")
    config = llm.llm_engine.vllm_config.model_config

    def load(model: torch.nn.Module) -> None:
        reload.initialize_layerwise_reload(model)
        model.load_weights(iter(tensors.items()))
        reload.finalize_layerwise_reload(model, config)

    return {"seconds": seconds(partial(llm.apply_model, load), repeats=20, warm_up=5)}


def step(work: w.Workload) -> Measurement:
    """The whole GRPO step on Ray, vLLM and DeepSpeed; median of the steps after the first two."""
    return _ppo_step(work, ["--vllm_num_engines", "1"], on_ray=True)


def step_local(work: w.Workload) -> Measurement:
    """The whole GRPO step in one process without Ray, the policy generating itself."""
    return _ppo_step(work, ["--vllm_num_engines", "0"], on_ray=False)


def step_local_vllm(work: w.Workload) -> Measurement:
    """The whole GRPO step in one process without Ray, with vLLM in it."""
    return _ppo_step(work, ["--vllm_num_engines", "1"], on_ray=False)


def _ppo_step(work: w.Workload, extra: list[str], *, on_ray: bool) -> Measurement:
    from openrlhf.cli import train_ppo, train_ppo_ray
    from openrlhf.utils.tracker import read_metrics

    num_steps = num_steps_of(work)
    folder = work.model.parent
    reward = folder / "reward.py"
    reward.write_text(REWARD_CODE)
    samples = str(work.num_completions)
    argv = (
        f"--pretrain {work.model} --remote_rm_url {reward} --input_key input "
        f"--prompt_data {w.write_prompts(folder, num_steps=num_steps, model=work.model)} "
        f"--advantage_estimator group_norm --init_kl_coef 0 --n_samples_per_prompt {w.NUM_SAMPLES} "
        f"--rollout_batch_size {w.NUM_PROMPTS} --train_batch_size {samples} "
        f"--micro_rollout_batch_size {samples} --use_dynamic_batch "
        f"--train_max_tokens_per_gpu 2048 --prompt_max_len 64 "
        f"--generate_max_len {work.max_new_tokens} --actor_learning_rate 1e-6 "
        f"--save_path {folder / 'run'}"
    ).split()
    (train_ppo_ray if on_ray else train_ppo).main([*argv, *extra])
    steps = [r for r in read_metrics(folder / "run" / "metrics.jsonl") if "reward" in r][2:]
    names = [name for name in steps[0] if name.startswith("timing/")]
    result = {name: statistics.median(s[name] for s in steps) for name in names}
    lengths = statistics.mean(s["response_length"] for s in steps)
    return {"seconds": result["timing/step_total"], "response_length": lengths} | result


REWARD_CODE = """
def reward_func(queries, prompts, labels):
    return {"rewards": [float(sum(map(ord, query)) % 7) for query in queries]}
"""


def step_trl(work: w.Workload) -> Measurement:
    """The whole step of TRL's GRPOTrainer: same model, prompts, dtype, group size and lengths."""
    import datasets
    import trl
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    num_steps = num_steps_of(work)
    model = AutoModelForCausalLM.from_pretrained(work.model, dtype=torch.float32)
    rows = [{"prompt": text} for text in w.prompt_texts(work.model)] * num_steps
    ends: list[float] = []

    class Clock(TrainerCallback):
        """Notes when steps end."""

        def on_step_end(self, *args: object, **kwargs: object) -> None:
            ends.append(time.monotonic())

    args = trl.GRPOConfig(
        output_dir=str(work.model.parent / "trl"),
        per_device_train_batch_size=work.micro_batch,
        gradient_accumulation_steps=work.num_completions // work.micro_batch,
        num_generations=w.NUM_SAMPLES,
        max_completion_length=work.max_new_tokens,
        max_steps=num_steps,
        learning_rate=1e-6,
        beta=0.0,
        bf16=False,
        fp16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
    )

    def reward(completions: list[str], **_: object) -> list[float]:
        return [float(sum(map(ord, text)) % 7) for text in completions]

    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=args,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(work.model),
        callbacks=[Clock()],
    )
    trainer.train()
    times = [after - before for before, after in pairwise(ends[1:])]
    log = [r for r in trainer.state.log_history if "completions/mean_length" in r]
    return {
        "seconds": statistics.median(times),
        "response_length": statistics.mean(r["completions/mean_length"] for r in log),
    }


MEASURES = {
    f.__name__: f
    for f in (
        generate_plain,
        generate_vllm,
        generate_hf,
        training,
        memory_copy,
        weight_sync,
        vllm_reload,
        step,
        step_local,
        step_local_vllm,
        step_trl,
    )
}


def main() -> None:
    """Measure what the command line names."""
    name, folder, *rest = sys.argv[1:]
    max_new_tokens = int(rest[0]) if rest else 64
    hidden_size = int(rest[1]) if len(rest) > 1 else 256
    work = w.make_workload(Path(folder), max_new_tokens=max_new_tokens, hidden_size=hidden_size)
    if len(rest) > 2:
        work = replace(work, micro_batch=int(rest[2]))
    print("RESULT " + json.dumps(MEASURES[name](work)))


if __name__ == "__main__":
    main()
