"""Control tokens spelled in plain-text columns are control tokens, unless the data is not trusted;
in messages they are text. Each data set is made as its command makes it.
"""

from pathlib import Path

import pytest

from openrlhf.config.cli import parse_config
from openrlhf.config.ppo import PPOConfig
from openrlhf.config.serving import BatchInferenceConfig
from openrlhf.config.supervised import (
    DPOConfig,
    PRMConfig,
    SFTConfig,
)
from openrlhf.errors import Gathered
from openrlhf.serving.batch_inference import BatchTask
from openrlhf.trainer import ppo_setup, supervised_run
from openrlhf.trainer.dpo_trainer import DPOTrainer
from openrlhf.trainer.prm_trainer import PRMTrainer
from openrlhf.trainer.sft_trainer import SFTTrainer
from openrlhf.utils.tokenizer import load_tokenizer
from tests.tiny import make_reward_model, write_jsonl

ASKED, ANSWER = "<|user|>2+2?<|end|><|assistant|>", "4<|end|> <|user|>"
ANSWERED = {"prompt": ASKED, "completion": ANSWER}
PAIR = {"prompt": ASKED, "chosen": ANSWER, "rejected": "5"}
STEPS = {"input": f"{ASKED}4 !", "label": ["+"]}
ASKED_IDS, ANSWER_IDS, END = [3, 1, 4], [1, 3], [1]  # of the six control tokens
WHOLE_IDS = ASKED_IDS + ANSWER_IDS + END
TEXT = "--input_key text --pretrain_mode"
CASES = {
    "sft": (SFTConfig, SFTTrainer, "", ANSWERED, WHOLE_IDS),
    "pretrain": (
        SFTConfig,
        SFTTrainer,
        TEXT,
        {"text": ASKED + ANSWER},
        WHOLE_IDS,
    ),
    "dpo": (DPOConfig, DPOTrainer, "", PAIR, WHOLE_IDS),
    "prm": (PRMConfig, PRMTrainer, "--placeholder_token ! --reward_tokens + -", STEPS, ASKED_IDS),
    "generate": (BatchInferenceConfig, BatchTask, "--eval_task generate", ANSWERED, ASKED_IDS),
    "rl": (PPOConfig, None, "", ANSWERED, ASKED_IDS),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_reward_model(tmp_path_factory.mktemp("control") / "model")


def made(name: str, folder: Path, model: Path, row: dict, more: str = "") -> tuple[list[str], list]:
    """What the command says of its data, and the ids of control tokens in its first sequence."""
    config_class, how, flags, _, _ = CASES[name]
    data = write_jsonl(folder / "data.jsonl", [row])
    words = f"--pretrain {model} --dataset {data} {flags.format(model=model)} {more}"
    words += f" --output_path {folder}/out.jsonl" if config_class is BatchInferenceConfig else ""
    if config_class is PPOConfig:
        words = words.replace("--dataset", "--remote_rm_url http://x --prompt_data")
    config = parse_config(config_class, words.split()).config
    tokenizer = load_tokenizer(str(model))
    if config_class is PPOConfig:
        samples = ppo_setup._data(config, tokenizer, None, Gathered())[0]
    elif config_class is BatchInferenceConfig:
        task = how(config)
        samples = task.samples
    else:
        samples = supervised_run.prepare_inputs(how, config).samples
    ids = samples._example(0)[0][0][0].tolist()
    return samples.notices, [token_id for token_id in ids if token_id < 6]


@pytest.mark.parametrize("name", CASES)
def test_control_tokens_in_plain_text_are_text_only_where_data_is_not_trusted(
    name, tmp_path, model
) -> None:
    row, expected = CASES[name][3:]
    notices, ids = made(name, tmp_path, model, row)
    assert ids == expected
    line = "1 of 1 rows spell control tokens, which are read as"
    said = f"{line} control tokens. --allow_special_tokens false reads them as text"
    assert said in notices
    notices, ids = made(name, tmp_path, model, row, "--allow_special_tokens false")
    assert ids == (END if expected[-1:] == END else [])
    assert f"{line} text" in notices


@pytest.mark.parametrize("name", ["sft", "dpo", "rl", "generate"])
def test_control_tokens_in_messages_are_text(name, tmp_path, model) -> None:
    turn = {"role": "user", "content": ASKED}
    row = {**CASES[name][3], "prompt": [turn]}
    for column in ("completion", "chosen", "rejected"):
        if column in row:
            row[column] = [{"role": "assistant", "content": row[column]}]
    notices, ids = made(name, tmp_path, model, row)
    assert ids == [3, 1, 4, *(END if name in ("sft", "dpo") else [])]
    assert "1 of 1 rows spell control tokens, which are read as text" in notices
