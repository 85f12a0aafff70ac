"""What a command says of a model that reads pictures, before it loads one: of pictures in `check`,
and of all that does not go with them in one line each.
"""

from pathlib import Path

import pytest

from openrlhf.cli import batch_inference, check
from openrlhf.models import loading
from tests.helpers import tiny_vision
from tests.integration.commands import exit_code
from tests.tiny import make_model, write_jsonl

REWARD = "def reward_func(queries, prompts, labels):\n    return [0.0 for _ in queries]\n"
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
ROW = {"prompt": "<image>what?", "images": ["a.png"], "answer": "b", "rejected": "c", "label": 1}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    tiny_vision.make("qwen3_vl", folder / "vision")
    make_model(folder / "text")
    return folder


@pytest.fixture(autouse=True)
def folder(models, tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAY_ADDRESS", "local")
    for name in ("vision", "text"):
        Path(name).symlink_to(models / name)
    tiny_vision.noise(56, 84).save("a.png")
    rows = [ROW, ROW | {"prompt": "look: <image> and <image>", "images": ["a.png"] * 2}]
    write_jsonl("rows.jsonl", rows)
    write_jsonl("texts.jsonl", [{"text": f"a{IMAGE}", "images": ["a.png"]}, {"text": "a"}])
    Path("reward.py").write_text(REWARD)
    return tmp_path


ANSWERED = "--dataset rows.jsonl --input_key prompt --output_key answer"
SFT = f"sft --pretrain vision {ANSWERED}"
PPO = (
    "ppo-local --pretrain vision --prompt_data rows.jsonl --input_key prompt --label_key answer "
    "--rollout_batch_size 2 --train_batch_size 2 --n_samples_per_prompt 1 --prompt_max_len 99 "
    "--generate_max_len 9"
)


def test_check_shows_size_and_tokens_of_each_picture(capsys):
    """84x56 pixels are 3 x 2 tokens of 28x28."""
    assert exit_code(check.main, SFT.split()) == 0
    said = capsys.readouterr().out
    assert "row 1: 18 tokens, 2 learnt\nimage 1: 84x56 pixels, 6 tokens\n" in said
    assert "image 2: 84x56 pixels, 6 tokens\n" in said
    assert "<|user|><|vision_start|><|image_pad|><|vision_end|>what?" in said


def test_check_counts_the_weights_of_a_frozen_tower_as_not_trained(capsys):
    assert exit_code(check.main, f"{SFT} --freeze_visual_encoder".split()) == 0
    assert "parameters  419.7k, 108.2k trained" in capsys.readouterr().out


def test_check_says_that_its_memory_has_no_share_of_what_a_tower_computes(capsys):
    assert exit_code(check.main, SFT.split()) == 0
    assert "; what its tower keeps of images comes on top" in capsys.readouterr().out


def test_pretraining_text_is_read_without_images(capsys):
    write_jsonl("texts.jsonl", [{"text": "an <image>", "images": ["a.png"]}])
    ppo = f"{PPO} --advantage_estimator rloo --remote_rm_url reward.py --pretrain_data texts.jsonl"
    exit_code(check.main, ppo.split())
    said = "".join(capsys.readouterr())
    assert "--pretrain_data: not read: 'images'" in said


SAYS = "reads images, which this does not support. Leave it out."
REFUSED = [
    (f"{SFT} --ring_attn_size 2", f"--ring_attn_size 2: vision {SAYS}"),
    (f"{SFT} --ds_tensor_parallel_size 2", f"--ds_tensor_parallel_size 2: vision {SAYS}"),
    (f"{SFT} --use_liger_kernel", f"--use_liger_kernel: vision {SAYS}"),
    (f"{SFT} --load_in_4bit --lora_rank 4", f"--load_in_4bit: vision {SAYS}"),
    (f"{SFT} --attn_implementation flex_attention", f"flex_attention: vision {SAYS}"),
    (f"{SFT} --image_key photos", "column 'photos' is not in the data set"),
    (
        f"{SFT} --image_min_pixels 9000 --image_max_pixels 8000",
        "at least 9000 pixels and at most 8000",
    ),
    (
        f"{PPO} --advantage_estimator rloo --remote_rm_url reward.py --pretrain_data texts.jsonl",
        "--pretrain_data: data set: 1 bad rows",
    ),
    (f"{SFT} --max_images_per_prompt 1", "row 2: 2 images, over --max_images_per_prompt 1"),
    (
        f"sft --pretrain text {ANSWERED} --freeze_visual_encoder --image_max_pixels 9999",
        "--freeze_visual_encoder, --image_max_pixels: text reads no images",
    ),
    (f"kto --pretrain vision {ANSWERED}", "openrlhf kto reads texts alone"),
    (f"kd --pretrain vision --teacher_model vision {ANSWERED}", "openrlhf kd reads texts alone"),
    (
        "dpo --pretrain vision --ref_pretrain text --dataset rows.jsonl --prompt_key prompt "
        "--chosen_key answer --rejected_key rejected",
        "text is of the family qwen2, which does not read the images of vision",
    ),
    ("rm --pretrain vision --dataset rows.jsonl --chosen_key answer", "Reward models and critics"),
    (f"{PPO} --remote_rm_url reward.py", "Reward models and critics read texts alone"),
    (
        f"{PPO} --advantage_estimator rloo --reward_pretrain vision",
        "Reward models and critics read texts alone",
    ),
    ("prm --pretrain vision --dataset rows.jsonl", "openrlhf prm reads texts alone"),
]


@pytest.mark.parametrize(("line", "told"), REFUSED)
def test_what_does_not_go_with_pictures_is_one_line(capsys, line, told):
    assert exit_code(check.main, line.split()) == 2
    problems = [one for one in capsys.readouterr().err.splitlines() if one.startswith("error: ")]
    assert [one for one in problems if told in one], problems


@pytest.mark.parametrize(("kind", "package"), [("vision", "torchvision"), ("smol", "num2words")])
def test_vllm_without_a_package_that_it_reads_images_through_is_refused(
    capsys, monkeypatch, kind, package
):
    if kind == "smol":
        tiny_vision.make("smolvlm", "smol")
    monkeypatch.setattr(loading, "find_spec", lambda name: name != package or None)
    rl = f"{PPO} --remote_rm_url reward.py --advantage_estimator group_norm --vllm_num_engines 1"
    infer = "--pretrain vision --dataset rows.jsonl --input_key prompt --output_path o.jsonl"
    lines = {check.main: rl, batch_inference.main: f"{infer} --eval_task generate_vllm"}
    for main, line in lines.items():
        words = line.replace("--pretrain vision", f"--pretrain {kind}").split()
        assert exit_code(main, words) == 2
        assert f"through {package}, which is not installed" in capsys.readouterr().err


@pytest.mark.parametrize(("kind", "num_tokens"), [("internvl", 28), ("idefics3", 20)])
def test_families_with_tiles_are_checked_alike(capsys, kind, num_tokens):
    """84x56 pixels are 3x2 tiles and the whole, or 2x2 and the whole; of four tokens each."""
    tiny_vision.make(kind, "tiles")
    words = SFT.replace("--pretrain vision", "--pretrain tiles")
    assert exit_code(check.main, words.split()) == 0
    assert f"image 1: 84x56 pixels, {num_tokens} tokens\n" in capsys.readouterr().out
    for refused in ("--ring_attn_size 2", "--ds_tensor_parallel_size 2", "--use_liger_kernel"):
        assert exit_code(check.main, [*words.split(), *refused.split()]) == 2
        assert f"{refused}: tiles {SAYS}" in capsys.readouterr().err


@pytest.mark.parametrize("column", ["videos", "audios"])
def test_other_media_are_refused_by_row(capsys, column):
    write_jsonl("rows.jsonl", [ROW, ROW | {column: ["a.mp4"]}])
    assert exit_code(check.main, SFT.split()) == 2
    assert f"row 2: '{column}' has a value" in capsys.readouterr().err
