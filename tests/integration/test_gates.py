"""A side that samples otherwise ends a run rather than train it on nonsense."""

import pytest

from tests.integration.commands import argv, run_command, steps_of

FLAGS = "--advantage_estimator group_norm --init_kl_coef 0 --n_samples_per_prompt 2 "


# An engine that forgets the temperature.
FORGETFUL = """
import sys
from dataclasses import replace
from openrlhf.cli import train_ppo
from openrlhf.engines.vllm_engine import VLLMEngine

submit = VLLMEngine.submit

def forgetful(self, requests, *args, **options):
    plain = [replace(r, sampling=replace(r.sampling, temperature=1.0)) for r in requests]
    return submit(self, plain, *args, **options)

VLLMEngine.submit = forgetful
train_ppo.main(sys.argv[1:])
"""


@pytest.mark.slow
def test_a_temperature_that_one_side_forgot_ends_the_first_step(given: dict) -> None:
    """In processes of their own: one that held vLLM and let go of it cannot hold it again."""
    flags = "--vllm_num_engines 1 --enforce_eager --temperature 0.6 --max_samples 4 "
    flags += "--rollout_batch_size 4"
    run_command("-m", "openrlhf.cli.train_ppo", *argv(FLAGS + flags, **given))
    [step] = steps_of(given["save_path"])
    assert step["vllm_kl"] < 1e-6 and step["logprobs_diff_max"] < 1e-3
    given["save_path"] = given["save_path"].with_name("forgetful")
    said = run_command("-c", FORGETFUL, *argv(FLAGS + flags, **given), code=3)
    assert "engine and trainer disagree about the sampled tokens at step 1" in said
