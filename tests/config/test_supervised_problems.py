"""Contradictions in the settings of supervised and serving commands, and what is merely said."""

from __future__ import annotations

import pytest

from openrlhf.config.cli import parse_config
from openrlhf.config.serving import BatchInferenceConfig, ChatConfig, LoraCombinerConfig
from openrlhf.config.supervised import (
    DPOConfig,
    KDConfig,
    KTOConfig,
    PRMConfig,
    RMConfig,
    SFTConfig,
)
from openrlhf.errors import ConfigError

ROWS = "--pretrain m --dataset d "
NEEDS = {
    RMConfig: ROWS,
    DPOConfig: ROWS,
    KTOConfig: ROWS,
    PRMConfig: ROWS + "--placeholder_token <step> ",
    KDConfig: ROWS + "--teacher_model t ",
    BatchInferenceConfig: ROWS + "--output_path o.jsonl --eval_task ",
    LoraCombinerConfig: "--model_path m --lora_path l ",
    ChatConfig: "--pretrain m ",
}


def problems(config_class, line):
    with pytest.raises(ConfigError) as caught:
        parse_config(config_class, line.split())
    return caught.value.problems


def notices(config_class, line):
    return list(parse_config(config_class, (NEEDS[config_class] + line).split()).notices)


@pytest.mark.parametrize(
    ("config_class", "line", "expected"),
    [
        (
            DPOConfig,
            "--loss_type exo_pair --label_smoothing 0",
            "--loss_type exo_pair needs --label_smoothing above 0: 0.0. Type --label_smoothing "
            "0.001.",
        ),
        (
            DPOConfig,
            "--ipo --label_smoothing 0.1",
            "--label_smoothing 0.1 is set with --loss_type ipo, which takes none. Leave it out or "
            "type one of sigmoid, robust, exo_pair.",
        ),
        (
            PRMConfig,
            "--apply_chat_template",
            "--apply_chat_template is set, and train_prm takes --input_key as it is. Leave it out "
            "and write the template into the data.",
        ),
        (
            KDConfig,
            "--pretrain_mode --kd_on_policy",
            "--pretrain_mode is set together with --kd_on_policy. Leave one of them out.",
        ),
        (
            KDConfig,
            "--kd_on_policy --kd_max_new_tokens 64 --max_len 64",
            "--kd_max_new_tokens 64 leaves no room for a prompt in --max_len 64. Type "
            "--kd_max_new_tokens 32 or --max_len 128.",
        ),
        (
            BatchInferenceConfig,
            "generate --post_processor rs",
            "--post_processor rs needs rewards, and --eval_task generate makes none. Leave it "
            "out, and type it with --eval_task rm on the output.",
        ),
        (
            BatchInferenceConfig,
            "generate --best_of_n 4 --temperature 0",
            "--best_of_n 4 with --temperature 0 gives one answer 4 times. Leave one out.",
        ),
        (
            BatchInferenceConfig,
            "rm --post_processor csft --reward_template {input}",
            "--reward_template has no {reward}: {input}. Write {reward} into it.",
        ),
    ],
)  # fmt: skip
def test_one_problem_is_one_line_with_flag_value_and_remedy(config_class, line, expected):
    assert problems(config_class, NEEDS[config_class] + line) == [expected]


def test_what_is_missing_is_named():
    model = "No model is named. Type --pretrain with a hub id or a path."
    rows = "No training data is named. Type --dataset with a hub id or a path."
    assert problems(RMConfig, "") == [model, rows]
    assert problems(DPOConfig, "") == [model, rows]
    assert problems(KTOConfig, "") == [rows]
    assert problems(PRMConfig, "") == [
        model,
        rows,
        "No step end is named. Type --placeholder_token with a token of the tokenizer.",
    ]
    assert problems(KDConfig, "") == [
        model,
        rows,
        "No teacher is named. Type --teacher_model with a hub id or a path.",
    ]
    assert problems(ChatConfig, "") == [model]
    assert problems(BatchInferenceConfig, "") == [
        "No task is named. Type --eval_task generate_vllm, generate or rm.",
        model,
        "No data is named. Type --dataset with a hub id or a path.",
        "No output is named. Type --output_path with the .jsonl file to write.",
    ]
    assert problems(LoraCombinerConfig, "") == [
        "No base model is named. Type --model_path with a hub id or a path.",
        "No adapter is named. Type --lora_path with its folder.",
        "No output is named. Type --output_path with the folder to write.",
    ]


def test_notices_of_kto_and_distillation():
    assert notices(KTOConfig, "") == []
    assert list(parse_config(KTOConfig, ["--dataset", "d"]).notices) == [
        "--pretrain is not set: starting from bigscience/bloomz-1b7."
    ]
    assert notices(KDConfig, "--max_len 64") == []
    assert notices(KDConfig, "--kd_on_policy --temperature 0.7 --kd_max_new_tokens 8") == []
    assert notices(KDConfig, "--kd_on_policy --kd_coef 0.5") == [
        "--kd_coef 0.5 with --kd_on_policy: the rest of the loss learns the student's own "
        "answers. Type --kd_coef 1."
    ]


def test_a_checkpoint_with_nothing_in_it_is_refused():
    line = "--pretrain m --dataset d --save_steps 10 --disable_ds_ckpt"
    [problem] = problems(SFTConfig, line)
    assert "--save_steps 10 with --disable_ds_ckpt saves nothing" in problem
    assert parse_config(SFTConfig, f"{line} --save_hf_ckpt".split()).config.ckpt.save_hf


def test_weights_of_four_bits_need_an_adapter_and_stay_whole():
    line = "--pretrain m --dataset d --load_in_4bit"
    assert [problem.split(":")[0] for problem in problems(SFTConfig, f"{line} --zero_stage 3")] == [
        "--load_in_4bit trains adapters, and --lora_rank is 0. Add --lora_rank 16 or leave "
        "--load_in_4bit out.",
        "--load_in_4bit with --zero_stage 3",
    ]
    assert parse_config(SFTConfig, f"{line} --lora_rank 8".split()).config.ds.load_in_4bit


def test_the_router_loss_needs_a_graph_through_the_layers():
    line = "--pretrain m --dataset d --aux_loss_coef 0.1 --gradient_checkpointing_use_reentrant"
    [problem] = problems(SFTConfig, f"{line} --gradient_checkpointing")
    assert problem.endswith("Type --gradient_checkpointing alone.")
    assert parse_config(SFTConfig, line.split()).config.model.aux_loss_coef == 0.1
