"""Control tokens spelled in plain-text columns are control tokens, unless the data is not trusted;
in messages they are text. Each data set is the one that its command names.
"""

from pathlib import Path
from pkgutil import resolve_name

import pytest

from openrlhf.config.cli import parse_config
from openrlhf.config.methods import METHODS
from openrlhf.config.ppo import PPOConfig
from openrlhf.config.serving import BatchInferenceConfig
from openrlhf.config.supervised import DPOConfig, PRMConfig, SFTConfig
from openrlhf.datasets.command_data import inference_data, ppo_data, supervised_data
from openrlhf.errors import Gathered
from openrlhf.utils.tokenizer import tokenizer_of
from tests.tiny import CHAT_TEMPLATE, make_reward_model, write_jsonl

ASKED, ANSWER = "<|user|>2+2?<|end|><|assistant|>", "4<|end|> <|user|>"
ANSWERED = {"prompt": ASKED, "completion": ANSWER}
PAIR = {"prompt": ASKED, "chosen": ANSWER, "rejected": "5"}
STEPS = {"input": f"{ASKED}4 !", "label": ["+"]}
ASKED_IDS, ANSWER_IDS, END = [3, 1, 4], [1, 3], [1]  # of the six control tokens
WHOLE_IDS = ASKED_IDS + ANSWER_IDS + END
STEPWISE = "--placeholder_token ! --reward_tokens + - --dataset"
INFERENCE = "--eval_task generate --output_path {folder}/out.jsonl --dataset"
RECIPES = {method.config_class: resolve_name(method.recipe) for method in METHODS.values()}
# Config, flags before the file, a row, and the control tokens of its first sequence.
CASES = {
    "sft": (SFTConfig, "--dataset", ANSWERED, WHOLE_IDS),
    "pretrain": (
        SFTConfig,
        "--input_key text --pretrain_mode --dataset",
        {"text": ASKED + ANSWER},
        WHOLE_IDS,
    ),
    "dpo": (DPOConfig, "--dataset", PAIR, WHOLE_IDS),
    "prm": (PRMConfig, STEPWISE, STEPS, ASKED_IDS),
    "generate": (BatchInferenceConfig, INFERENCE, ANSWERED, ASKED_IDS),
    "rl": (PPOConfig, "--remote_rm_url http://x --prompt_data", ANSWERED, ASKED_IDS),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_reward_model(tmp_path_factory.mktemp("control") / "model")


def made(name: str, folder: Path, model: Path, row: dict, more: str = "") -> tuple[list[str], list]:
    """What the command says of its data, and the ids of control tokens in its first sequence."""
    config_class, flags, *_ = CASES[name]
    data, gathered = write_jsonl(folder / "data.jsonl", [row]), Gathered()
    words = f"--pretrain {model} {flags.format(folder=folder)} {data} {more}"
    config = parse_config(config_class, words.split()).config
    if isinstance(config, BatchInferenceConfig):
        data_set = inference_data(config)
    elif config_class is PPOConfig:
        data_set, *_ = ppo_data(config)
    else:
        recipe = RECIPES[config_class]
        data_set, *_ = supervised_data(config, recipe.data_set, **recipe.row_format(config))
    rows = data_set.read(gathered)
    samples = data_set.tokenise(gathered, rows, tokenizer_of(config, str(model)))
    ids = samples._example(0)[0][0][0].tolist()
    return samples.notices, [token_id for token_id in ids if token_id < 6]


@pytest.mark.parametrize("name", CASES)
def test_control_tokens_in_plain_text_are_text_only_where_data_is_not_trusted(
    name, tmp_path, model
) -> None:
    *_, row, expected = CASES[name]
    notices, ids = made(name, tmp_path, model, row)
    assert ids == expected
    line = "1 of 1 rows spell control tokens, which are read as"
    said = f"{line} control tokens. --allow_special_tokens false reads them as text"
    assert said in notices
    notices, ids = made(name, tmp_path, model, row, "--allow_special_tokens false")
    assert ids == (END if expected[-1:] == END else [])
    assert f"{line} text" in notices


def dialogue(name: str) -> dict:
    """The row of a command as messages."""
    turn = {"role": "user", "content": ASKED}
    row = {**CASES[name][2], "prompt": [turn]}
    for column in ("completion", "chosen", "rejected"):
        if column in row:
            row[column] = [{"role": "assistant", "content": row[column]}]
    return row


@pytest.mark.parametrize("name", ["sft", "dpo", "rl", "generate"])
def test_commands_set_variables_of_the_template(name, tmp_path, model) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{% if tools_are_on %}<|tool|>{% endif %}" + CHAT_TEMPLATE)
    flags = f"--tokenizer_chat_template {template}"
    assert made(name, tmp_path, model, dialogue(name), flags)[1][0] == 3
    flags += ' --chat_template_kwargs {"tools_are_on":true}'
    assert made(name, tmp_path, model, dialogue(name), flags)[1][0] == 5


@pytest.mark.parametrize("name", ["sft", "dpo", "rl", "generate"])
def test_control_tokens_in_messages_are_text(name, tmp_path, model) -> None:
    notices, ids = made(name, tmp_path, model, dialogue(name))
    assert ids == [3, 1, 4, *(END if name in ("sft", "dpo") else [])]
    assert "1 of 1 rows spell control tokens, which are read as text" in notices
