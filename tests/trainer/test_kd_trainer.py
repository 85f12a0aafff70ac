"""Distillation: what a student samples with, answers of its own, teachers that are refused."""

import copy
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from openrlhf import api
from openrlhf.commands.train_supervised import prepare_inputs, say_inputs
from openrlhf.config.cli import parse_config
from openrlhf.config.supervised import KDConfig
from openrlhf.distributed.weights import hf_model_of
from openrlhf.engines.base import GenerationRequest, SamplingSettings
from openrlhf.engines.own_generate import OwnGenerate
from openrlhf.errors import ConfigError, DataError
from openrlhf.models.loading import load_causal_lm
from openrlhf.trainer.kd_trainer import KDTrainer, Student, Teacher, as_head, sampling_of
from openrlhf.utils.packing import PackedBatch, base_model_of
from openrlhf.utils.tokenizer import load_tokenizer
from tests.tiny import make_model, write_jsonl


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kd")
    make_model(folder / "model")
    make_model(folder / "teacher", hidden_size=96, seed=7)
    return folder


def test_a_student_samples_with_its_adapter(folder: Path) -> None:
    line = f"--pretrain {folder}/teacher --teacher_model {folder}/teacher --dataset d "
    config = parse_config(KDConfig, f"{line} --kd_on_policy --lora_rank 4".split()).config
    student = KDTrainer.load_model(config, str(folder / "teacher"))
    with torch.no_grad():
        for name, parameter in student.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(1))
    engine = OwnGenerate(base_model_of(hf_model_of(student)))
    request = GenerationRequest(
        "r", (70, 71, 72), SamplingSettings(temperature=0, max_new_tokens=9)
    )
    [[answer]] = engine.generate([request])
    merged = copy.deepcopy(hf_model_of(student)).merge_and_unload()
    base = load_causal_lm(folder / "teacher")
    ids = torch.tensor([[70, 71, 72]])
    greedy, without = (
        model.generate(ids, do_sample=False, max_new_tokens=9, attention_mask=torch.ones_like(ids))
        for model in (merged, base)
    )
    num_told = len(answer.token_ids)
    assert answer.token_ids == tuple(greedy[0, 3 : 3 + num_told].tolist())
    assert without.tolist() != greedy.tolist()


def test_a_student_stops_where_it_is_told(folder: Path) -> None:
    model = str(folder / "model")
    line = f"--pretrain {model} --teacher_model {model} --dataset d --kd_on_policy --stop ab"
    config = parse_config(KDConfig, f"{line} --stop_token_ids 9".split()).config
    tokenizer = load_tokenizer(model)
    sampling = sampling_of(config, model, tokenizer)
    assert sampling.stop == ("ab",) and sampling.stop_token_ids == (tokenizer.eos_token_id, 9)


def test_a_student_that_answers_reads_prompts_alone(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = shutil.copytree(folder / "model", tmp_path / "model")
    (model / "generation_config.json").write_text('{"do_sample": true, "top_k": 20, "min_p": 0.1}')
    data = write_jsonl(tmp_path / "rows.jsonl", [{"question": "2+2="}, {"question": "x" * 14}])
    line = f"--pretrain {model} --teacher_model {model} --dataset {data} --input_key question "
    line += f"--save_path {tmp_path}/run --kd_max_new_tokens 5"
    answers = f"{line} --kd_on_policy --max_len".split()
    config = parse_config(KDConfig, [*answers, "32"]).config
    inputs = prepare_inputs(KDTrainer, config)
    say_inputs(KDTrainer, config, inputs)
    [prompt] = [inputs.samples[row] for row in range(len(inputs.samples))]
    assert inputs.tokenizer.decode(prompt.prompt_token_ids) == "User: 2+2=\nAssistant: "
    said = " ".join(capsys.readouterr().err.split())
    assert f"not used: top_k 20, min_p 0.1 of the generation config of {model}" in said
    assert "1 of 2 rows were left out: over-long" in said
    with pytest.raises(DataError, match=r"over-long: 2\). Check --input_key and --max_len"):
        prepare_inputs(KDTrainer, parse_config(KDConfig, [*answers, "9"]).config)
    with pytest.raises(DataError, match="no response column is given"):
        prepare_inputs(KDTrainer, parse_config(KDConfig, line.split()).config)


def test_a_student_answers_the_dialogues_that_it_is_evaluated_on(
    folder: Path, tmp_path: Path
) -> None:
    dialogue = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    row = {"prompt": "q", "prompt_id": "1", "messages": dialogue}
    data, model = write_jsonl(tmp_path / "rows.jsonl", [row]), folder / "model"
    line = f"--pretrain {model} --teacher_model {model} --dataset {data} --eval_dataset {data} "
    line += f"--save_path {tmp_path}/run --kd_on_policy"
    inputs = prepare_inputs(KDTrainer, parse_config(KDConfig, line.split()).config)
    decode, held_out = inputs.tokenizer.decode, inputs.eval_samples
    prompt = decode(inputs.samples[0].prompt_token_ids)
    assert prompt == "<|user|>q<|end|><|assistant|>"
    assert decode(held_out[0].token_ids) == f"{prompt}a<|end|>"


def refusal(folder: Path, words: str) -> str:
    needs = f"--pretrain {folder}/model --dataset d "
    config = parse_config(KDConfig, (needs + words).split()).config
    with pytest.raises(ConfigError) as error:
        KDTrainer.check(config, load_tokenizer(str(folder / "model")))
    return str(error.value)


def test_logits_that_only_the_teacher_has_are_left_out(folder: Path, tmp_path: Path) -> None:
    model = load_causal_lm(folder / "model")
    student = Student(model, coef=0.5, kind="forward")
    wide = Teacher(load_causal_lm(make_model(tmp_path / "wide", vocab_size=300)))
    ids, mask = torch.arange(10, 20), torch.ones(10, dtype=torch.bool)
    mask[0] = False
    batch = PackedBatch.from_sequences([ids], [mask])
    head = as_head(wide.head, wide(batch))
    narrow = replace(head, weight_VH=head.weight_VH[:262])
    assert len(head.weight_VH) == 300
    for found, expected in zip(student(batch, head)[:3], student(batch, narrow)[:3], strict=True):
        assert torch.equal(found, expected)
    student(batch, head)[0].backward()
    assert model.get_output_embeddings().weight.grad.abs().sum() > 0


def test_a_teacher_with_other_tokens_is_refused(folder: Path, tmp_path: Path) -> None:
    teacher = make_model(tmp_path / "other")
    path = teacher / "tokenizer.json"
    core = json.loads(path.read_text())
    vocab = core["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    path.write_text(json.dumps(core))
    assert f"token 'a' is {vocab['a']} there, {vocab['b']} here" in refusal(
        folder, f"--teacher_model {teacher}"
    )


def test_sampling_from_split_weights_is_refused(folder: Path) -> None:
    line = refusal(folder, f"--teacher_model {folder}/teacher --kd_on_policy --zero_stage 3")
    assert "--zero_stage 2" in line


def test_stop_ids_that_no_token_has_are_refused(folder: Path) -> None:
    words = f"--teacher_model {folder}/model --kd_on_policy --stop_token_ids 999999"
    assert "--stop_token_ids 999999" in refusal(folder, words)


def test_an_evaluation_has_what_a_best_model_may_be_chosen_by(folder: Path, tmp_path: Path) -> None:
    data = str(write_jsonl(tmp_path / "rows.jsonl", [{"input": "q", "output": "a"}] * 2))
    result = api.kd(
        pretrain=str(folder / "model"),
        teacher_model=str(folder / "teacher"),
        dataset=data,
        eval_dataset=data,
        output_key="output",
        train_batch_size=2,
        save_best="distil_loss",
        save_path=str(tmp_path / "run"),
        ckpt_path=str(tmp_path / "ckpt"),
    )
    logged = {name for values in result.history for name in values}
    assert {f"eval/{name}" for name in KDTrainer.judged_by} <= logged
    assert list((tmp_path / "ckpt").glob("best_*"))
