"""Contradictions and typos are refused, all together, with the flag, the value and the remedy."""

from typing import get_args

import pytest

from openrlhf.config.base import Caution
from openrlhf.config.cli import parse_config
from openrlhf.config.evaluation import EvaluateConfig
from openrlhf.config.ppo import Estimator, PPOConfig, RewardConfig
from openrlhf.config.serving import (
    BatchInferenceConfig,
    ChatConfig,
    LoraCombinerConfig,
    ServeRewardConfig,
)
from openrlhf.config.supervised import (
    DPOConfig,
    KDConfig,
    KTOConfig,
    PRMConfig,
    RMConfig,
    SFTConfig,
)
from tests.helpers.configs import NEEDS, problems


def notices(config_class, line):
    return list(parse_config(config_class, (NEEDS[config_class] + line).split()).notices)


PPO_PROBLEMS = [
    ("--advantage_estimator rloo --n_samples_per_prompt 1",
     "--advantage_estimator rloo compares the samples of a prompt, and --n_samples_per_prompt is "
     "1. Type --n_samples_per_prompt 8 (or any number above 1)."),
    ("--advantage_estimator dr_grpo --gamma 0.9",
     "--advantage_estimator dr_grpo needs --gamma 1: 0.9. Type --gamma 1."),
    ("--is_correction_level geometric",
     "--is_correction_level geometric needs --enable_vllm_is_correction. Add it, or leave "
     "--is_correction_level geometric out."),
    ("--dynamic_filtering",
     "--dynamic_filtering replaces prompts whose samples have equal scores, and "
     "--n_samples_per_prompt is 1. Type --n_samples_per_prompt 8 (or any number above 1)."),
    ("--overlong_buffer_len 2048 --generate_max_len 1024",
     "--overlong_buffer_len 2048 is more than --generate_max_len 1024, so every response is "
     "penalised. Type --overlong_buffer_len 256."),
    ("--rollout_batch_size 16 --n_samples_per_prompt 4 --train_batch_size 128",
     "--train_batch_size 128 is more than the 64 samples of a step (--rollout_batch_size 16 x "
     "--n_samples_per_prompt 4). Type --train_batch_size 64 or --rollout_batch_size 32."),
    ("--remote_rm_url a.py:f,http://h:1/r",
     "--remote_rm_url a.py:f,http://h:1/r names functions and servers. Name functions alone: one "
     "of them can ask a server."),
    ("--colocate_all_models --actor_num_gpus_per_node 8 --ref_num_gpus_per_node 4",
     "--ref_num_gpus_per_node 4 differs from --actor_num_gpus_per_node 8, and the two models share "
     "their GPUs. Type --ref_num_gpus_per_node 8."),
    ("--max_len 512 --prompt_max_len 300 --generate_max_len 300",
     "--max_len 512 is less than --prompt_max_len 300 + --generate_max_len 300. Type --max_len "
     "600."),
    ("--reward_pretrain a",
     "--reward_pretrain a and --remote_rm_url r.py both give rewards. Leave one out "
     "(--critic_pretrain names the model that a critic starts from)."),
    ("--reward_failure ignore",
     "--reward_failure cannot be ignore: it is not known. Type fail, drop_group, retry or "
     "'retry(5)'."),
    ("--advantage_estimator grpo",
     f"--advantage_estimator must be one of {', '.join(get_args(Estimator))}: grpo. Type "
     "group_norm, or file.py:name of your own."),
    ("--report_to slack",
     "--report_to is unknown: slack. Type one of wandb, all, trackio, mlflow, tensorboard, none."),
    ("--qqqq 1", "--qqqq is not a known name. --help all lists all of them."),
    ("--policy_loss_type PPO",
     "--policy_loss_type must be one of ppo, gspo, cispo, sapo: PPO. Type ppo, or file.py:name of "
     "your own."),
    ("--is_correction_gating tv",
     "--is_correction_gating tv needs --enable_vllm_is_correction. Add it, or leave "
     "--is_correction_gating tv out."),
    ("--is_correction_level seq --is_correction_gating binary_kl --is_correction_threshold 0.1 1",
     "--is_correction_gating binary_kl has an upper bound alone: --is_correction_threshold 0.1 1. "
     "Type --is_correction_threshold 0.05."),
    ("--rollout_batch_size 128 --vllm_generate_batch_size 256",
     "--vllm_generate_batch_size 256 is more than --rollout_batch_size 128. Add --async_train, "
     "which generates ahead."),
    # Two names of one setting must agree.
    ("--bf16 --ds.param_dtype fp16",
     "--ds.param_dtype fp16 contradicts --bf16: both set ds.param_dtype. Leave one of them out."),
    ("--use_wandb abc --logger.wandb.key def",
     "--logger.wandb.key contradicts --use_wandb: both set logger.wandb.key. Leave one of them "
     "out."),
]  # fmt: skip
PROBLEMS = [
    (SFTConfig, "--save_steps 10 --disable_ds_ckpt",
     "--save_steps 10 with --disable_ds_ckpt saves nothing. Add --save_hf_ckpt, or leave one of "
     "them out."),
    (KTOConfig, "--train_batch_size 1",
     "--train_batch_size must be at least 2: 1. Type --train_batch_size 2."),
    (PRMConfig, "--apply_chat_template",
     "--apply_chat_template is not a known name. --help all lists all of them."),
    (PRMConfig, "--micro_train_b 1",
     "--micro_train_b is not a known name. Did you mean --micro_train_batch_size?"),
    (PRMConfig, "--reward_tokens +",
     "--reward_tokens takes 2 or more values: +. Type them with spaces between."),
    (BatchInferenceConfig, "rm --post_processor csft --reward_template {input}",
     "--reward_template has no {reward}. Write {reward} into it."),
    (EvaluateConfig, "--output_path o.jsonl",
     "--output_path names a folder: o.jsonl. Type --output_path o."),
    (LoraCombinerConfig, "m/", "--output_path is --model_path: m. Type another folder."),
    (ServeRewardConfig, "--reward_weights 1 2",
     "--reward_weights has 2 values for 1 models of --reward_pretrain. Type one weight for each "
     "model."),
]  # fmt: skip
ASYNC = "--async_train --vllm_num_engines 0 --enable_vllm_is_correction"
CLASHES = [
    (PPOConfig, ASYNC, "--async_train with --vllm_num_engines 0"),
    (PPOConfig, "--is_correction_level off --enable_vllm_is_correction",
     "--is_correction_level off with --enable_vllm_is_correction"),
    (PPOConfig, "--is_correction_level seq --is_correction_mode clip",
     "--is_correction_mode clip with --is_correction_level seq"),
    (SFTConfig, "--ds_tensor_parallel_size 2 --zero_stage 3",
     "--ds_tensor_parallel_size 2 with --zero_stage 3"),
    (SFTConfig, "--load_in_4bit", "--load_in_4bit with --lora_rank 0"),
    (SFTConfig, "--pretrain_mode --multiturn", "--pretrain_mode with --multiturn"),
    (EvaluateConfig, "--load_in_4bit", "--load_in_4bit with --vllm_num_engines 1"),
    (DPOConfig, "--loss_type exo_pair --label_smoothing 0",
     "--label_smoothing 0.0 with --loss_type exo_pair"),
    *((DPOConfig, f"--loss_type {loss} {flag}", f"{flag} with --loss_type {loss}")
      for loss in ("simpo", "orpo", "cpo")
      for flag in ("--ref_pretrain m", "--ref_offload", "--precompute_ref_log_probs")),
    (DPOConfig, "--loss_type orpo --simpo_gamma 0.3", "--simpo_gamma 0.3 with --loss_type orpo"),
    (DPOConfig, "--ipo_length_average", "--ipo_length_average with --loss_type sigmoid"),
    (DPOConfig, "--ipo --label_smoothing 0.1", "--label_smoothing 0.1 with --loss_type ipo"),
    (KDConfig, "--kd_on_policy --kd_max_new_tokens 64 --max_len 64",
     "--kd_max_new_tokens 64 with --max_len 64"),
    (BatchInferenceConfig, "generate --post_processor rs",
     "--post_processor rs with --eval_task generate"),
]  # fmt: skip


@pytest.mark.parametrize(("config_class", "line", "both"), CLASHES)
def test_settings_that_do_not_go_together_are_named(config_class, line, both):
    expected = f"{both}: not supported. Leave one of them out."
    assert problems(config_class, NEEDS[config_class] + line) == [expected]


@pytest.mark.parametrize(
    ("config_class", "line", "expected"),
    [*((PPOConfig, *case) for case in PPO_PROBLEMS), *PROBLEMS],
)
def test_one_problem_is_one_line_with_flag_value_and_remedy(config_class, line, expected):
    assert problems(config_class, NEEDS[config_class] + line) == [expected]


@pytest.mark.parametrize(
    "rest", ["--remote_rm_url r.py --vllm_num_engines 0", "--reward_pretrain m"]
)
def test_an_evaluation_takes_4_bits_where_a_model_of_its_own_is_held_so(rest):
    line = f"--models m --dataset d --load_in_4bit {rest}"
    assert parse_config(EvaluateConfig, line.split()).config.ds.load_in_4bit


@pytest.mark.parametrize("flag", ["-gamma", "–gamma", "—gamma=0.5", "-algo.advantage.gamma"])
def test_a_flag_behind_another_dash_is_no_value_of_the_flag_before(flag):
    shown = flag.partition("=")[0]
    assert problems(PPOConfig, f"{NEEDS[PPOConfig]} {flag} 1") == [
        f"{shown} does not begin with two hyphens. Type --{shown[1:]}."
    ]


@pytest.mark.parametrize(
    ("config_class", "line", "said"),
    [
        (SFTConfig, "--adam_betas 0.9 1.0", "--adam_betas must be below 1.0: 0.9 1.0."),
        (SFTConfig, "--adam_betas -2 0.9", "--adam_betas must be at least 0.0: -2 0.9."),
        (PPOConfig, "--sapo_tau 0 0", "--sapo_tau must be above 0.0: 0 0."),
        (SFTConfig, "--max_len 1.2.3", "--max_len must be a whole number: 1.2.3."),
        (SFTConfig, "--push_to_hub true", "--push_to_hub cannot be true: it is not known. Type"),
    ],
)
def test_a_value_that_would_do_harm_is_refused(config_class, line, said):
    [problem] = problems(config_class, f"{NEEDS[config_class]} {line}")
    assert problem.startswith(said)


def test_loggers_named_one_by_one_are_said_to_replace_each_other():
    [said, *_] = notices(SFTConfig, " --report_to wandb --report_to tensorboard")
    assert said == "--report_to is given twice: wandb and tensorboard. The last counts."


def test_all_problems_are_listed_together():
    line = "train --pretrian m --prompt_data d --train_batch_size x --gamma 0.5 --adam_betas 0.9 "
    assert problems(PPOConfig, line + "--advantage_estimator rloo --remote_rm_url r.py stray") == [
        "train stands before any flag. Type --NAME before a value.",
        "--pretrian is not a known name. Did you mean --pretrain?",
        "--remote_rm_url takes one value: r.py stray. Type commas between several, and quotes "
        "around a text with spaces.",
        "--train_batch_size must be a whole number: x. Type a whole number.",
        "--adam_betas takes 2 values: 0.9. Type them with spaces between.",
        "No model is named. Type --pretrain with a folder with a config.json, or a hub id such as "
        "org/name.",
        "--advantage_estimator rloo needs --gamma 1: 0.5. Type --gamma 1.",
    ]


@pytest.mark.parametrize(
    ("config_class", "missing"),
    [
        (RMConfig, {"model", "data set"}),
        (KTOConfig, {"data set"}),
        (PRMConfig, {"model", "data set", "step end"}),
        (KDConfig, {"model", "data set", "teacher"}),
        (ChatConfig, {"model"}),
        (BatchInferenceConfig, {"task", "output", "model", "data set"}),
        (LoraCombinerConfig, {"base model", "adapter", "output"}),
        (ServeRewardConfig, {"reward model"}),
    ],
)
def test_what_is_missing_is_named(config_class, missing):
    found = problems(config_class, "")
    assert {line.split(" is named. Type --")[0] for line in found} == {f"No {w}" for w in missing}


@pytest.mark.parametrize(
    ("line", "is_caution"),
    [
        ("--trust_remote_code", True),
        ("--use_kl_loss", True),
        ("--kl_estimator k3", True),
        ("--use_wandb secret", True),
        ("--async_train", False),
        ("--advantage_estimator rloo", False),
        ("--actor_init_on_gpu", False),
        ("--perf", False),
        ("--top_p 0.9", True),
        ("--policy_loss_type gspo", True),
        ("--policy_loss_type sapo --dual_clip 3", False),
        ("--policy_loss_type cispo --dual_clip 3", False),
        ("--policy_loss_type sapo --eps_clip 0.3", False),
        (
            "--policy_loss_type gspo --eps_clip 0.1 --loss_aggregation seq_mean "
            "--advantage_estimator reinforce",
            False,
        ),
        ("--advantage_estimator reinforce --lambd 0.9", False),
        ("--advantage_estimator reinforce --critic_learning_rate 1e-5", False),
        ("--init_kl_coef 0 --kl_target 6", False),
        ("--lora_rank 8 --lora_dropout 0.1 --actor_learning_rate 1e-4", False),
    ],
)
def test_a_notice_is_a_caution_only_where_something_is_at_stake(line, is_caution):
    assert [isinstance(notice, Caution) for notice in notices(PPOConfig, line)] == [is_caution]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--reward_clip_range 10 -10", " is no range. Type --reward_clip_range -10 10."),
        ("--reward_clip_range 1 1", " is no range. Type --reward_clip_range LOW HIGH"),
        ("--is_correction_threshold 5 0.5", " is no range. Type --is_correction_threshold 0.5 5."),
        ("--dynamic_filtering_reward_range 1 0", " is no range. Type --dynamic_filtering"),
        ("--eps_clip_low_high -0.2 0.2", ": distances from the ratio 1. Type numbers above 0"),
        ("--eps_clip_low_high 0 0", ": distances from the ratio 1. Type numbers above 0"),
    ],
)
def test_pairs_of_numbers_are_ranges(line, expected):
    [problem] = problems(PPOConfig, f"{NEEDS[PPOConfig]} {line}")
    assert problem.startswith(line + expected)


def test_cispo_reads_the_upper_distance_alone():
    line = "--policy_loss_type cispo --eps_clip_low_high 0 4"
    assert notices(PPOConfig, line) == []


def test_a_setting_that_others_switch_off_is_named():
    said = "--dual_clip has no effect with --policy_loss_type sapo."
    assert notices(PPOConfig, "--policy_loss_type sapo --dual_clip 3") == [said]
    assert notices(PPOConfig, "--policy_loss_type sapo --eps_clip 0.2") == []  # the default


@pytest.mark.parametrize(
    ("config_class", "line", "said"),
    [
        (
            SFTConfig,
            "--lr_scheduler cosine --min_lr_ratio 0.5",
            "--min_lr_ratio has no effect with --lr_scheduler cosine.",
        ),
        (
            PPOConfig,
            "--lr_scheduler linear --min_lr_ratio 0.5",
            "--min_lr_ratio has no effect with --lr_scheduler linear.",
        ),
        (
            SFTConfig,
            "--lr_scheduler constant --lr_warmup_ratio 0.5",
            "--lr_warmup_ratio has no effect with --lr_scheduler constant.",
        ),
        (
            SFTConfig,
            "--optim muon --muon.lr 0.01 --max_norm 0.3",
            "--max_norm has no effect with --optim muon.",
        ),
        (
            SFTConfig,
            "--optim muon",
            "--optim muon: matrices of layers learn at --muon.lr 0.02; --learning_rate 5e-06 is "
            "the rate of the rest.",
        ),
        (
            PPOConfig,
            "--optim muon",
            "--optim muon: matrices of layers learn at --actor.muon.lr 0.02; "
            "--actor_learning_rate 1e-06 is the rate of the rest.",
        ),
        (SFTConfig, "--eval_steps 50", "--eval_steps has no effect without --eval_dataset."),
        (SFTConfig, "--save_hf_ckpt", "--save_hf_ckpt has no effect without --save_steps."),
        (
            PPOConfig,
            "--train_max_tokens_per_gpu 3000",
            "--train_max_tokens_per_gpu has no effect without --use_dynamic_batch.",
        ),
        (
            PPOConfig,
            "--dynamic_filtering_reward_range 0.1 0.9",
            "--dynamic_filtering_reward_range has no effect without --dynamic_filtering.",
        ),
        (
            PPOConfig,
            "--is_correction_threshold 0.5 3",
            "--is_correction_threshold has no effect without --enable_vllm_is_correction.",
        ),
        (
            PPOConfig,
            "--eps_clip 0.3 --eps_clip_low_high 0.2 0.28",
            "--eps_clip has no effect beside --eps_clip_low_high.",
        ),
        (PPOConfig, "--ptx_coef 0.1", "--ptx_coef has no effect without --pretrain_data."),
        (
            PPOConfig,
            "--rollout_max_tokens_per_gpu 9000",
            "--rollout_max_tokens_per_gpu has no effect without --use_dynamic_batch.",
        ),
        (
            PPOConfig,
            "--is_correction_type tis",
            "--is_correction_type has no effect without --enable_vllm_is_correction.",
        ),
        (
            PPOConfig,
            "--enable_vllm_is_correction --is_correction_clamp_survivors",
            "--is_correction_clamp_survivors has no effect without --is_correction_mode mask.",
        ),
        (
            PPOConfig,
            "--kl_unbiased_gradient --init_kl_coef 0",
            "--kl_unbiased_gradient has no effect with --init_kl_coef 0, which leaves the "
            "reference out.",
        ),
        (
            PPOConfig,
            "--kl_unbiased_gradient --kl_estimator k2",
            "--kl_estimator k2 without --use_kl_loss gives a wrong gradient of the KL. Type "
            "--kl_estimator k1.",
        ),
        (PPOConfig, "--ema_beta 0.9", "--ema_beta has no effect without --enable_ema."),
        (
            PPOConfig,
            "--dynamic_filtering_max_empty 3",
            "--dynamic_filtering_max_empty has no effect without --dynamic_filtering.",
        ),
        (
            PPOConfig,
            "--async_train --enable_vllm_is_correction --rollout_batch_size 128 "
            "--vllm_generate_batch_size 512",
            "--vllm_generate_batch_size 512: at most 256 prompts are generated at once, "
            "(--async_queue_size + 1) x --rollout_batch_size, so that no sample is too old.",
        ),
        (
            PPOConfig,
            "--vllm_num_engines 0 --enforce_eager",
            "--enforce_eager has no effect with --vllm_num_engines 0.",
        ),
        (
            PPOConfig,
            "--agent_timeout_s 60",
            "--agent_timeout_s has no effect without --agent_func_path.",
        ),
        (
            PPOConfig,
            "--normalize_reward",
            "--normalize_reward has no effect without --reward_pretrain.",
        ),
        (
            PPOConfig,
            "--vllm_enable_sleep",
            "--vllm_enable_sleep has no effect without --colocate_all_models.",
        ),
        (
            PPOConfig,
            "--eval_temperature 0",
            "--eval_temperature has no effect without --eval_dataset.",
        ),
        (
            KDConfig,
            "--temperature 2",
            "--temperature has no effect without --kd_on_policy: the student answers nothing.",
        ),
    ],
)
def test_a_setting_that_nothing_reads_is_named(config_class, line, said):
    assert notices(config_class, line) == [said]


def test_settings_of_an_adapter_need_its_rank():
    for typed in ("--lora_alpha 32", "--target_modules q_proj", "--lora_dropout 0.1"):
        [problem] = problems(SFTConfig, f"{NEEDS[SFTConfig]} {typed}")
        assert "settings of LoRA without --lora_rank: all weights would be trained." in problem
    assert notices(SFTConfig, "--lora_rank 0 --lora_alpha 32") == []


def test_export_fp32_is_of_supervised_runs():
    typed = f"{NEEDS[SFTConfig]} --export_fp32"
    assert notices(SFTConfig, "--export_fp32") == []
    assert "not supported" in problems(SFTConfig, f"{typed} --ds_tensor_parallel_size 2")[0]
    [problem] = problems(PPOConfig, f"{NEEDS[PPOConfig]} --export_fp32")
    assert "--export_fp32" in problem


def test_a_model_that_nobody_named_is_said():
    assert notices(KTOConfig, "") == []
    assert notices(KTOConfig, "--lora_rank 8 --learning_rate 1e-4") == []
    for config_class, name, rate in (
        (KTOConfig, "--learning_rate", "1e-05"),
        (PPOConfig, "--actor_learning_rate", "1e-06"),
    ):
        [line] = notices(config_class, "--lora_rank 8")
        assert line.startswith(f"--lora_rank 8 with {name} {rate}, the default for all weights: ")
        assert line.endswith(f"Type {name} 0.0001.")
    assert list(parse_config(KTOConfig, ["--dataset", "d"]).notices) == [
        "--pretrain is not set: starting from bigscience/bloomz-1b7."
    ]


@pytest.mark.parametrize("name", ["train_split", "muon.no_nesterov", "compute_fp32_loss"])
def test_flags_of_old_commands_without_effect_are_taken_and_said(name):
    said = f"--{name} has no effect; it is accepted for old commands."
    assert notices(SFTConfig, f"--{name} 1") == [said]


def test_scores_of_several_reward_models_have_the_names_of_the_models() -> None:
    for paths, names in (
        ("a/helpful, b/safe/", ["helpful", "safe"]),
        ("a/rm,b/rm,c", ["rm_1", "rm_2", "c"]),
    ):
        assert RewardConfig(model_name_or_path=paths).model_names == names


def test_a_flag_given_twice_with_other_values_is_said():
    line = "--gamma 1 --lambd 0.9 --lambd 0.95 --gamma 1"
    assert "--lambd is given twice: 0.9 and 0.95. The last counts." in notices(PPOConfig, line)
    assert not any("--gamma" in said for said in notices(PPOConfig, line))


@pytest.mark.parametrize(
    ("config_class", "flag"),
    [
        (PPOConfig, "--temperature"),
        (PPOConfig, "--eval_temperature"),
        (EvaluateConfig, "--temperature"),
        (BatchInferenceConfig, "--temperature"),
        (ChatConfig, "--temperature"),
        (KDConfig, "--temperature"),
    ],
)
def test_a_temperature_above_two_which_vllm_refuses_is_refused_by_every_command(config_class, flag):
    assert [problem for problem in problems(config_class, f"{flag} 3") if flag in problem]
    assert not [problem for problem in problems(config_class, f"{flag} 2") if flag in problem]


def test_stops_of_a_student_that_does_not_answer_are_refused():
    [line] = problems(KDConfig, NEEDS[KDConfig] + "--stop_token_ids 7")
    assert line.endswith("Type --kd_on_policy.")
