"""SFT and DPO on pictures of colours: learnt from pixels, exported, resumed, frozen, adapted."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from openrlhf.cli import main as console
from openrlhf.cli import train_dpo, train_sft
from openrlhf.models.actor import Actor
from openrlhf.models.loading import load_causal_lm
from openrlhf.utils.images import ImageProcessor, read_picture
from openrlhf.utils.packing import PackedBatch
from openrlhf.utils.vision_families import FAMILIES
from tests.distributed.spawn import meet_elsewhere, run_ranks
from tests.helpers import tiny_vision
from tests.helpers.documents import blocks, commands
from tests.helpers.stopped_runs import records, stopping_behind
from tests.helpers.supervised_runs import weights_of
from tests.helpers.vision_samples import Samples
from tests.integration.commands import run_command, steps_of
from tests.source import ROOT
from tests.tiny import read_jsonl, write_jsonl

WORDS = list(tiny_vision.COLOURS)
NUM_PICTURES = 320
LEARN = (
    "--train_batch_size 32 --micro_train_batch_size 32 --max_epochs 1 --learning_rate 2e-3 "
    "--lr_scheduler constant --lr_warmup_ratio 0"
)
COLUMNS = "--input_key prompt --output_key answer"
SHORT = (
    "--train_batch_size 8 --micro_train_batch_size 4 --max_epochs 1 --max_samples 32 "
    f"--learning_rate 1e-3 {COLUMNS}"
)


def make_inputs(root: Path, kind: str = "qwen2_5_vl", *, is_tied: bool = False) -> Path:
    """A model, pictures, rows of one question, and dialogues of two questions."""
    tiny_vision.make(kind, root / "model", is_tied=is_tied)
    rng = np.random.default_rng(0)
    (root / "pictures").mkdir()
    for i in range(NUM_PICTURES):
        tiny_vision.colour(WORDS[i % 4], rng).save(root / "pictures" / f"{i}.png")
    numbers = [i % NUM_PICTURES for i in range(60 * 32)]
    rows = [
        {"prompt": "<image>?", "images": [f"pictures/{i}.png"], "answer": WORDS[i % 4]}
        for i in numbers
    ]
    write_jsonl(root / "rows.jsonl", rows)
    pairs = [(i, int(rng.integers(NUM_PICTURES))) for i in numbers]
    dialogues = [
        {
            "messages": [
                {"role": role, "content": content}
                for k in pair
                for role, content in (("user", "<image>?"), ("assistant", WORDS[k % 4]))
            ],
            "images": [f"pictures/{k}.png" for k in pair],
        }
        for pair in pairs
    ]
    write_jsonl(root / "dialogues.jsonl", dialogues)
    return root


def start(root: Path, name: str, flags: str, rows: str = "rows.jsonl") -> None:
    meet_elsewhere()
    paths = f"--pretrain {root}/model --dataset {root}/{rows} --save_path {root}/{name}"
    train_sft.main([*paths.split(), *flags.split(), "--ckpt_path", f"{root}/{name}/ckpt"])


def accuracy(folder: Path, num_turns: int = 1, max_pixels: int | None = None) -> float:
    """The share of 64 new pictures whose word is the likeliest at every token."""
    num_pictures, processor = 64, ImageProcessor.load(str(folder), max_pixels=max_pixels)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    rng, ids, masks, pictures = np.random.default_rng(1), [], [], []
    for i in range(num_pictures):
        words = [WORDS[(i + k) % 4] for k in range(num_turns)]
        turns = [
            {"role": role, "content": content}
            for word in words
            for role, content in (
                ("user", [{"type": "image"}, {"type": "text", "text": "?"}]),
                ("assistant", word),
            )
        ]
        found = tokenizer.apply_chat_template(
            turns, return_dict=True, return_assistant_tokens_mask=True
        )
        pictures.append([read_picture(tiny_vision.colour(word, rng)) for word in words])
        parts = processor.expansions(found["input_ids"], pictures[-1])
        ids.append(torch.tensor([each for part in parts for each in part]))
        learnt = zip(found["assistant_masks"], parts, strict=True)
        masks.append(torch.tensor([flag for flag, part in learnt for _ in part]))
    packed = PackedBatch.from_sequences(ids, masks).with_pictures(pictures, processor)
    with torch.no_grad():
        is_top = Actor(load_causal_lm(folder))(packed).is_top
    hits = [part.all().item() for part in is_top.split(packed.num_targets.tolist())]
    return sum(hits) / num_pictures


def learn(root: Path) -> None:
    start(root, "single", f"{LEARN} {COLUMNS}")


def learn_otherwise(root: Path) -> None:
    start(root, "blind", f"{LEARN} {COLUMNS} --max_images_per_prompt 0")
    start(root, "multi", f"{LEARN} --multiturn", "dialogues.jsonl")


def test_colours_are_learnt_from_pixels_in_sixty_steps(tmp_path):
    """By a model whose embedding is its head, as in small ones of the families."""
    root = make_inputs(tmp_path, is_tied=True)
    run_ranks(learn, 1, root)
    assert records(root / "single")[-1]["step"] == 60
    assert accuracy(root / "single") >= 0.95
    exported, info = transformers.AutoModelForImageTextToText.from_pretrained(
        root / "single", output_loading_info=True, attn_implementation="eager"
    )
    assert not any(info.values())
    samples = Samples(str(root / "single"))
    found = Actor(load_causal_lm(root / "single"))(samples.batch([0])).logprobs
    assert (samples.alone(exported, 0) - found).abs().max() < 1e-5
    assert not any("lm_head" in name for name in weights_of(root / "single"))
    for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
        assert (root / "single" / name).read_text() == (root / "model" / name).read_text()
    assert type(transformers.AutoProcessor.from_pretrained(root / "single")).__name__ == (
        "Qwen2_5_VLProcessor"
    )


@pytest.mark.slow
def test_both_turns_of_a_dialogue_are_learnt_and_without_pictures_nothing_is(tmp_path):
    root = make_inputs(tmp_path)
    run_ranks(learn_otherwise, 1, root)
    assert accuracy(root / "multi", num_turns=2) >= 0.95
    assert accuracy(root / "blind") <= 0.35


def resume(root: Path) -> None:
    start(root, "straight", SHORT)
    saving = f"{SHORT} --save_steps 2 --load_checkpoint"
    with stopping_behind(2):
        start(root, "resumed", saving)
    start(root, "resumed", saving)


def recompute_and_evaluate(root: Path) -> None:
    rows = read_jsonl(root / "rows.jsonl")[:16]
    swapped = [row | {"images": rows[i - 1]["images"]} for i, row in enumerate(rows)]
    for name, held_out in (("plain", rows), ("recomputed", rows), ("swapped", swapped)):
        write_jsonl(root / f"eval_{name}.jsonl", held_out)
        more = f"--eval_dataset {root}/eval_{name}.jsonl --eval_steps 2"
        more += " --gradient_checkpointing" if name == "recomputed" else ""
        start(root, name, f"{SHORT} {more}")


def freeze(root: Path) -> None:
    start(root, "frozen", f"{SHORT} --freeze_visual_encoder")
    start(root, "adapted", f"{SHORT} --lora_rank 4")
    start(root, "trained", SHORT)


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("vision"), "qwen3_vl")


ONE_TILE = 56 * 56  # pixels


def tiled(root: Path) -> None:
    limit = f"--image_max_pixels {ONE_TILE}"
    start(root, "single", f"{LEARN} {COLUMNS} {limit}")
    start(root, "frozen", f"{SHORT} --freeze_visual_encoder")
    start(root, "adapted", f"{SHORT} --lora_rank 4 --target_modules all-linear")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["internvl", "idefics3", "smolvlm"])
def test_families_with_tiles_learn_colours_and_keep_a_frozen_tower(kind, tmp_path):
    root = make_inputs(tmp_path, kind)
    run_ranks(tiled, 1, root)
    assert accuracy(root / "single", max_pixels=ONE_TILE) >= 0.95
    _, info = transformers.AutoModelForImageTextToText.from_pretrained(
        root / "single", output_loading_info=True
    )
    assert not any(info.values())
    for name in ("preprocessor_config.json", "processor_config.json"):
        assert (root / "single" / name).read_text() == (root / "model" / name).read_text()
    if kind != "smolvlm":  # its processor needs num2words
        found = transformers.AutoProcessor.from_pretrained(root / "single")
        assert type(found).__name__.removesuffix("Processor").lower() == kind
    tower = {*FAMILIES[kind].tower}
    before, frozen, adapter = (weights_of(root / n) for n in ("model", "frozen", "adapted"))
    assert before.keys() == frozen.keys()
    moved = {name for name in before if not torch.equal(before[name], frozen[name])}
    assert moved == {name for name in before if not tower & {*name.split(".")}}
    assert adapter and not any(tower & {*name.split(".")} for name in adapter)


def test_a_resumed_run_is_the_run_that_was_not_stopped(root):
    run_ranks(resume, 1, root)
    assert records(root / "straight") == records(root / "resumed")
    expected, found = weights_of(root / "straight"), weights_of(root / "resumed")
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_a_frozen_tower_keeps_its_bits_and_an_adapter_is_on_the_language_model(root):
    run_ranks(freeze, 1, root)
    before = weights_of(root / "model")

    def changed(name: str, *, in_tower: bool) -> list[str]:
        after = weights_of(root / name)
        assert after.keys() == before.keys()
        names = [key for key in before if ("visual." in key) == in_tower]
        return [key for key in names if not torch.equal(before[key], after[key])]

    assert changed("frozen", in_tower=True) == []
    assert changed("frozen", in_tower=False) and changed("trained", in_tower=True)
    adapter = weights_of(root / "adapted")
    assert adapter and all("language_model" in name for name in adapter)
    shutil.copytree(root / "adapted", root / "merged")
    assert ImageProcessor.load(str(root / "merged")).image_token_id == 8
    load_causal_lm(root / "merged")


@pytest.mark.slow
def test_recomputed_activations_give_the_same_weights_and_an_evaluation_sees_the_pictures(root):
    run_ranks(recompute_and_evaluate, 1, root)
    names = ("plain", "recomputed", "swapped")
    plain, recomputed, swapped = (weights_of(root / name) for name in names)
    for key, tensor in plain.items():
        torch.testing.assert_close(recomputed[key], tensor, atol=1e-6, rtol=0)
        assert torch.equal(swapped[key], tensor)
    losses = [
        [r["eval/gpt_loss"] for r in records(root / n) if "eval/gpt_loss" in r] for n in names
    ]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5) and len(losses[0]) >= 2
    assert all(abs(a - b) > 1e-4 for a, b in zip(losses[0][1:], losses[2][1:], strict=True))


def prefer(root: Path) -> None:
    """The better word of a pair fits the picture, the worse one fits another."""
    rng = np.random.default_rng(2)
    rows = []
    for i in range(40 * 16):
        other = WORDS[(i + rng.integers(1, 4)) % 4]
        pictures = [f"pictures/{i % NUM_PICTURES}.png"]
        rows.append({"prompt": "<image>?", "images": pictures, "chosen": WORDS[i % 4]})
        rows[-1]["rejected"] = other
    write_jsonl(root / "pairs.jsonl", rows)
    meet_elsewhere()
    words = f"--pretrain {root}/model --dataset {root}/pairs.jsonl --save_path {root}/preferred"
    flags = "--train_batch_size 16 --micro_train_batch_size 16 --learning_rate 1e-3 --beta 0.1"
    more = "--lr_scheduler constant --lr_warmup_ratio 0 --max_epochs 1"
    train_dpo.main([*words.split(), *flags.split(), *more.split()])


def test_a_preference_for_what_a_picture_shows_is_learnt(root):
    """Without pictures each word is the better one as often as the worse one."""
    run_ranks(prefer, 1, root)
    last = [record["acc"] for record in records(root / "preferred")][-5:]
    assert sum(last) / len(last) >= 0.9


def documented(root: Path) -> None:
    os.chdir(root)
    for block in blocks("bash", ROOT / "docs" / "vision.md"):
        for words in commands(block, root):
            if words[:2] == ["openrlhf", "sft"]:
                meet_elsewhere()
                words[words.index("--pretrain") + 1] = "model"
                console.main(words[1:])


def test_the_commands_of_the_document_train(tmp_path):
    tiny_vision.make("qwen3_vl", tmp_path / "model")
    (tmp_path / "pictures").mkdir()
    for word in ("red", "blue"):
        picture = tiny_vision.colour(word, np.random.default_rng(0))
        picture.save(tmp_path / "pictures" / f"{word}.png")
    run_ranks(documented, 1, tmp_path)
    assert weights_of(tmp_path / "output" / "colours")
    assert (tmp_path / "output" / "parts" / "adapter_config.json").is_file()


NO_TORCHVISION = """
import sys
sys.modules["torchvision"] = None
from openrlhf.cli.main import main
main(sys.argv[1:])
"""


@pytest.mark.slow
def test_an_engine_of_a_model_of_texts_needs_no_torchvision(tiny_model_dir, tmp_path):
    rows = [{"prompt": "2+2=", "answer": "4"}] * 4
    (tmp_path / "reward.py").write_text(
        "def reward_func(prompts, **columns): return [1.0 for _ in prompts]\n"
    )
    flags = (
        "--input_key prompt --rollout_batch_size 4 --train_batch_size 4 --generate_max_len 4 "
        "--advantage_estimator reinforce --init_kl_coef 0 --vllm_num_engines 1"
    )
    paths = ["--pretrain", tiny_model_dir, "--remote_rm_url", tmp_path / "reward.py"]
    paths += ["--prompt_data", write_jsonl(tmp_path / "rows.jsonl", rows)]
    run_command("-c", NO_TORCHVISION, "ppo-local", *paths, *flags.split(), "--save_path", tmp_path)
    assert [step["step"] for step in steps_of(tmp_path)] == [1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["text", "vision"])
def test_training_needs_no_torchvision(kind, root, tiny_model_dir, tmp_path):
    flags = f"--max_samples 32 --max_epochs 1 --train_batch_size 16 {COLUMNS}"
    row = {"prompt": "2+2=", "answer": "4"}
    model, rows = tiny_model_dir, write_jsonl(tmp_path / "rows.jsonl", [row] * 32)
    if kind == "vision":
        model, rows = root / "model", root / "rows.jsonl"
    paths = ["--pretrain", model, "--dataset", rows, "--save_path", tmp_path / "run"]
    run_command("-c", NO_TORCHVISION, "sft", *paths, *flags.split())
    assert records(tmp_path / "run")[-1]["step"] == 2
