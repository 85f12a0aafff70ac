"""What training leaves is served by vLLM as it is: a policy gives tokens the log-probs, a reward
model the scores that they have in Transformers, where `test_runs` compares them with the log.
"""

import os
from pathlib import Path

import pytest
import torch

from tests.distributed.spawn import run_ranks
from tests.helpers.trained import load, make_runs, sequences

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

VLLM_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
VLLM = {
    "dtype": "float32",
    "enforce_eager": True,
    "distributed_executor_backend": "uni",
    "kv_cache_memory_bytes": 2**26,
    "max_model_len": 256,
    "max_num_seqs": 8,
}


def texts(path: Path) -> list[dict]:
    return [{"prompt_token_ids": ids.tolist()} for ids, _ in sequences(path, "chosen")]


def prompt_logprobs(folder: Path) -> list[float]:
    """Log-probs of all tokens but the first of every text in vLLM."""
    os.environ.update(VLLM_ENVIRONMENT)
    from vllm import LLM, SamplingParams

    sampling = SamplingParams(max_tokens=1, prompt_logprobs=0)
    llm = LLM(str(folder / "dpo"), **VLLM)  # type: ignore[arg-type]
    return [
        position[token_id].logprob
        for answer in llm.generate(texts(folder / "dpo"), sampling, use_tqdm=False)
        for position, token_id in zip(
            answer.prompt_logprobs[1:], answer.prompt_token_ids[1:], strict=True
        )
    ]


def score(folder: Path) -> list[float]:
    """Scores of the texts in vLLM."""
    os.environ.update(VLLM_ENVIRONMENT)
    from vllm import LLM, PoolingParams

    llm = LLM(str(folder / "rm"), runner="pooling", convert="classify", **VLLM)  # type: ignore[arg-type]
    params = PoolingParams(use_activation=False)  # a score, not a probability
    found = llm.classify(texts(folder / "rm"), pooling_params=params, use_tqdm=False)
    return [answer.outputs.probs[0] for answer in found]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_runs(tmp_path_factory.mktemp("exports"))


@torch.no_grad()
def test_a_policy_gives_tokens_the_log_probs_it_has_in_transformers(folder: Path) -> None:
    [found] = run_ranks(prompt_logprobs, 1, folder)
    model, expected = load(folder / "dpo"), []
    for ids, _ in sequences(folder / "dpo", "chosen"):
        logprobs = model(ids[None]).logits[0, :-1].log_softmax(-1)
        expected += logprobs.gather(-1, ids[1:, None])[:, 0].tolist()
    assert found == pytest.approx(expected, abs=1e-4)


@torch.no_grad()
def test_a_reward_model_scores_as_in_transformers(folder: Path) -> None:
    [found] = run_ranks(score, 1, folder)
    model = load(folder / "rm", "SequenceClassification")
    expected = [model(ids[None]).logits.item() for ids, _ in sequences(folder / "rm", "chosen")]
    assert found == pytest.approx(expected, abs=1e-5)
    assert max(expected) - min(expected) > 1e-3
