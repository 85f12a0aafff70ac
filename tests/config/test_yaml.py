"""YAML files give defaults that flags win over; a written config reads back as the same tree."""

import pytest
import yaml

from openrlhf.config.base import is_given, value_at, walk
from openrlhf.config.cli import parse_config, save_resolved
from openrlhf.config.ppo import PPOConfig
from openrlhf.config.supervised import KDConfig, PRMConfig, SFTConfig
from openrlhf.errors import ConfigError


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return ["--config", str(path)]


def problems(argv, config_class=SFTConfig):
    with pytest.raises(ConfigError) as caught:
        parse_config(config_class, argv)
    return caught.value.problems


TREE = """
model: {model_name_or_path: m}
data.dataset: d
micro_train_batch_size: 4
adam:
  lr: 1e-5
  betas: [0.8, 0.9]
bf16: true
ds: {zero_stage: 3, lora.rank: 8, lora.alpha: 32}
target-modules: [q_proj, v_proj]
"""


def test_keys_are_the_tree_dotted_names_or_flat_names(tmp_path):
    file = write(tmp_path / "run.yaml", TREE)
    config = parse_config(SFTConfig, file).config
    assert config.model.model_name_or_path == "m"
    assert config.data.dataset == "d"
    assert config.train.micro_batch_size == 4
    assert (config.adam.lr, config.adam.betas) == (1e-5, (0.8, 0.9))
    assert (config.ds.param_dtype, config.ds.zero_stage, config.ds.lora.alpha) == ("bf16", 3, 32)
    assert config.ds.lora.target_modules == ("q_proj", "v_proj")
    # Flags win over the file, wherever they stand.
    config = parse_config(SFTConfig, ["--learning_rate", "2e-5", *file, "--zero_stage", "2"]).config
    assert (config.adam.lr, config.ds.zero_stage) == (2e-5, 2)


@pytest.mark.parametrize(
    ("flag", "name", "left"),
    [
        ("--bf16 false", "ds.param_dtype", "auto"),
        ("--report_to none", "logger.wandb.key", None),
        ("--report_to trackio", "logger.wandb.key", None),
        ("--report_to trackio", "logger.tensorboard_dir", None),
        ("--report_to trackio", "logger.trackio", True),
        ("--report_to wandb --use_trackio", "logger.trackio", True),
    ],
)
def test_a_flag_switches_off_what_the_file_has_switched_on(tmp_path, flag, name, left):
    file = write(tmp_path / "run.yaml", TREE + "report_to: [wandb, tensorboard]\n")
    config = parse_config(SFTConfig, [*file, *flag.split()]).config
    assert value_at(config, name) == left


@pytest.mark.parametrize("word", ["false", "0", "Off"])
def test_bf16_is_not_off_and_on_at_once(word):
    line = f"--pretrain m --dataset d --bf16 {word} --ds.param_dtype bf16"
    [problem] = problems(line.split())
    said = f"--bf16 {word} contradicts --ds.param_dtype: both set ds.param_dtype"
    assert problem.startswith(said)


def test_a_number_may_be_written_in_two_ways():
    line = "--pretrain m --dataset d --learning_rate 1e-6 --adam.lr 0.000001"
    assert parse_config(SFTConfig, line.split()).config.adam.lr == 1e-6


def test_a_flat_key_for_several_models_yields_to_a_flag_for_one(tmp_path):
    file = write(
        tmp_path / "run.yaml", "{pretrain: m, prompt_data: d, remote_rm_url: r.py, max_norm: 2}"
    )
    config = parse_config(PPOConfig, [*file, "--critic.max_norm", "3"]).config
    assert (config.actor.max_norm, config.critic.max_norm) == (2, 3)


def test_unknown_keys_and_wrong_values_are_named_with_the_file(tmp_path):
    text = TREE + "train: {batch_siz: 4, seed: abc}\nuse_tensorbord: x\n"
    assert problems(write(tmp_path / "run.yaml", text)) == [
        "run.yaml: train.batch_siz is not a known name. Did you mean --train.batch_size?",
        "run.yaml: use_tensorbord is not a known name. Did you mean --use_tensorboard?",
        "run.yaml: train.seed must be a whole number: abc. Type a whole number.",
    ]


def test_a_file_of_another_command_is_one_line(tmp_path):
    text = TREE + "".join(f"other{number}: 1\n" for number in range(11))
    [line] = problems(write(tmp_path / "run.yaml", text))
    assert "run.yaml has 11 names that this command does not know: other0, other1, other2" in line


@pytest.mark.parametrize(
    ("text", "reason"),
    [("- 1\n- 2", "no keys at its top"), ("a: [1", "line 1, column 4"), (None, "No such file")],
)
def test_a_file_that_is_no_config_is_one_line(tmp_path, text, reason):
    path = tmp_path / "run.yaml"
    argv = ["--config", str(path)] if text is None else write(path, text)
    [line] = problems([*argv, "--pretrain", "m", "--dataset", "d"])
    assert line.startswith(f"--config cannot be read: {path} (")
    assert reason in line


@pytest.mark.parametrize(
    ("config_class", "line"),
    [
        (
            PPOConfig,
            "--pretrain m --prompt_data d --reward_pretrain r --advantage_estimator rloo "
            "--colocate_all_models --actor_num_nodes 2 --eps_clip_low_high 0.1 0.3 --bf16 "
            "--use_tensorboard --max_len 2048 --rollout_batch_size 1 --train_batch_size 2 "
            "--overlong_buffer_len 64 --gradient_checkpointing --use_wandb secret",
        ),
        (SFTConfig, "--pretrain m --dataset d --input_template none --no_such"),
        (PRMConfig, "--pretrain m --dataset d --placeholder_token <s> --reward_tokens + -"),
    ],
)
def test_a_written_config_reads_back_as_the_same_tree(tmp_path, config_class, line):
    line = f"{line} --output_dir out"  # it is named after the second otherwise
    config = parse_config(config_class, line.replace("--no_such", "").split()).config
    save_resolved(config, tmp_path / "run" / "config.yaml")
    parsed = parse_config(config_class, ["--config", str(tmp_path / "run" / "config.yaml")])
    assert parsed.config == config
    assert parsed.config.model_dump() == config.model_dump()
    assert [is_given(parsed.config, o.path) for o in walk(config_class)] == [
        is_given(config, o.path) for o in walk(config_class)
    ]


def test_what_followed_from_the_rest_follows_again_from_a_written_config(tmp_path):
    needs = "--pretrain m --teacher_model t --dataset d --input_key q"
    file = tmp_path / "config.yaml"
    save_resolved(parse_config(KDConfig, needs.split()).config, file)
    kd = parse_config(KDConfig, ["--config", str(file), "--kd_on_policy"]).config.kd
    assert (kd.coef, kd.divergence) == (1.0, "reverse")
    file.write_text(file.read_text().replace("coef: 0.4", "coef: 0.7"))  # by hand
    kd = parse_config(KDConfig, ["--config", str(file), "--kd_on_policy"]).config.kd
    assert (kd.coef, kd.divergence) == (0.7, "reverse")
    save_resolved(parse_config(SFTConfig, ["--pretrain", "m", "--dataset", "d"]).config, file)
    [problem] = problems(["--config", str(file), "--lora_alpha", "64"])
    assert problem.startswith("settings of LoRA without --lora_rank")


def test_switches_of_flags_that_may_stand_alone(tmp_path):
    text = "{pretrain: m, dataset: d, save_path: o, use_tensorboard: true, use_wandb: true}"
    logger = parse_config(SFTConfig, write(tmp_path / "on.yaml", text)).config.logger
    assert (logger.tensorboard_dir, logger.wandb.key) == ("o/tensorboard", "true")
    text = text.replace("true", "false")
    logger = parse_config(SFTConfig, write(tmp_path / "off.yaml", text)).config.logger
    assert (logger.tensorboard_dir, logger.wandb.key) == (None, None)


def test_a_list_is_a_comma_list_where_one_may_stand(tmp_path):
    text = "{pretrain: m, dataset: [a, b], dataset_probs: [0.5, 0.5]}"
    data = parse_config(SFTConfig, write(tmp_path / "run.yaml", text)).config.data
    assert (data.dataset, data.dataset_probs) == ("a,b", "0.5,0.5")
    text = "{pretrain: [m, n], dataset: d, use_wandb: [canary, canary]}"
    assert problems(write(tmp_path / "run.yaml", text)) == [
        "run.yaml: pretrain takes one value: m n. Put quotes around a text with spaces.",
        "run.yaml: use_wandb takes one value: ***. Put quotes around a text with spaces.",
    ]


def test_a_key_is_never_written_and_never_kept_in_the_tree(tmp_path):
    argv = ["--dataset", "d", "--use_wandb", "canary-key-123", "--local_rank", "1"]
    parsed = parse_config(SFTConfig, ["--pretrain", "m", *argv])
    assert parsed.environment == {"WANDB_API_KEY": "canary-key-123"}
    assert "canary" not in parsed.config.model_dump_json()
    assert not any("canary" in line for line in parsed.notices)
    save_resolved(parsed.config, tmp_path / "c.yaml")
    text = (tmp_path / "c.yaml").read_text()
    assert "canary" not in text
    assert yaml.safe_load(text)["logger"]["wandb"]["key"] == "true"
    assert "local_rank" not in text  # of a process, not of a run


def test_a_stop_text_keeps_its_commas_and_line_breaks_on_the_way_through_a_file(tmp_path):
    flags = ["--pretrain", "m", "--prompt_data", "d", "--remote_rm_url", "r.py"]
    stops = ("a, b", "\n\n")
    config = parse_config(PPOConfig, [*flags, "--stop", *stops, "--stop_token_ids", "3,5"]).config
    save_resolved(config, tmp_path / "config.yaml")
    again = parse_config(PPOConfig, ["--config", str(tmp_path / "config.yaml")]).config
    assert again.rollout.stop == config.rollout.stop == stops
    assert again.rollout.stop_token_ids == (3, 5)


@pytest.mark.parametrize("text", ["max_len: 1\nmax_len: 2\n", "data: {max_len: 1}\ndata: {}\n"])
def test_a_key_that_stands_twice_is_named(tmp_path, text):
    problem, *_ = problems(write(tmp_path / "run.yaml", text))
    assert " stands twice in " in problem and "line 2" in problem


def test_a_key_without_a_value_is_no_text_of_that_word(tmp_path):
    for key in ("input_key", "max_len"):
        problem, *_ = problems(write(tmp_path / "run.yaml", f"{key}:\n"))
        assert problem == f"run.yaml: {key} stands without a value. Type a value after it."


def test_variables_of_the_chat_template_may_be_a_mapping(tmp_path):
    file = write(tmp_path / "run.yaml", TREE + "chat_template_kwargs: {think: false}")
    assert parse_config(SFTConfig, file).config.data.chat_template_kwargs == '{"think": false}'
    settings = {"pretrain": "m", "dataset": "d", "chat_template_kwargs": {"think": False}}
    config = parse_config(SFTConfig, [], settings=settings).config
    assert config.data.chat_template_kwargs == '{"think": false}'
