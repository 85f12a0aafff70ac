"""TRL's words: one table for the error and for docs/from-trl.md."""

import re

import pytest

from openrlhf.config.cli import flag_table, nearest
from openrlhf.config.from_trl import HERE, OF_ALL, OF_RL, OF_SUPERVISED, OF_VALUES
from openrlhf.config.methods import METHODS
from openrlhf.config.ppo import PPOConfig
from openrlhf.config.supervised import DPOConfig, SFTConfig
from tests.helpers.configs import NEEDS, problems
from tests.source import ROOT

TRAINERS = (PPOConfig, *(method.config_class for method in METHODS.values()))


@pytest.mark.parametrize(
    ("heading", "table"),
    [
        ("## Flags of all trainers", OF_ALL),
        ("## SFT, DPO, KTO, rewards", OF_SUPERVISED),
        ("## GRPO and RLOO", OF_RL),
    ],
)
def test_the_document_has_the_table_of_the_error(heading, table):
    section = (ROOT / "docs" / "from-trl.md").read_text().split(heading)[1].split("\n\n")[1]
    rows = re.findall(r"^\| (`.*?) \| (.*) \|$", section, re.MULTILINE)
    assert {words.replace("`", ""): text for words, text in rows} == table


def test_every_flag_of_the_table_is_one_of_a_trainers():
    known = {name for config_class in TRAINERS for name in flag_table(config_class)}
    for word, text in HERE.items():
        flags = re.findall(r"--(\w+)", text)
        assert set(flags) <= known, word
        is_here = word in known and word not in OF_VALUES  # which DPO has
        assert not is_here or word in flags, f"{word} is a flag here, and is said to be none"


@pytest.mark.parametrize(
    ("config_class", "word", "remedy"),
    [
        (SFTConfig, "gradient_accumulation_steps 4", "no flag: --train_batch_size is the whole"),
        (
            SFTConfig,
            "max_steps 10",
            "no flag: --max_epochs (RL: --num_episodes) and --max_samples.",
        ),
        (DPOConfig, "warmup_steps 10", "--lr_warmup_ratio, a share of all steps."),
        (PPOConfig, "reward_funcs r.py", "--remote_rm_url file.py; a model: --reward_pretrain."),
        (SFTConfig, "load_best_model_at_end", "--save_best: the best model is kept"),
        (PPOConfig, "log_completions", "--print_samples; every sample is in rollouts/."),
        (PPOConfig, "max_length 512", "--max_len."),
        (PPOConfig, "loss_type grpo", "--loss_aggregation or --policy_loss_type, by its value."),
        (PPOConfig, "use_vllm", "vLLM engines are the default"),
        (PPOConfig, "use_liger_loss", "--use_liger_kernel."),  # not --use_kl_loss
    ],
)
def test_the_words_that_trls_users_type_first_get_the_right_neighbour(config_class, word, remedy):
    [line] = problems(config_class, f"{NEEDS[config_class]} --{word}")
    name = word.split()[0]
    assert f"or --{name}." not in line and f"here: --{name} " not in line
    assert line.startswith(f"--{name} is not a known name. It is TRL's; here: {remedy}")


@pytest.mark.parametrize(
    ("config_class", "word"),
    [
        (SFTConfig, "reward_funcs"),  # of RL
        (SFTConfig, "train_dataset"),  # not --eval_dataset
        (SFTConfig, "label_names"),  # not --dataset_name
        (PPOConfig, "ddp_timeout"),  # not --reward_timeout_s
    ],
)
def test_a_suggestion_that_is_far_off_is_not_made(config_class, word):
    assert nearest(config_class, word) == []
    expected = f"--{word} is not a known name. --help all lists all of them."
    assert problems(config_class, f"{NEEDS[config_class]} --{word} x") == [expected]
