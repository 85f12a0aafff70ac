"""What is exported or handed to engines has the names and numbers of the files it came from."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

from openrlhf.config.common import DeepSpeedConfig, OptimizerConfig
from openrlhf.distributed.collectives import shut_down, world_size
from openrlhf.distributed.export import export_hf, without_folders, write_folder
from openrlhf.distributed.strategy import DeepSpeedStrategy
from openrlhf.distributed.weights import master_parameters, stored_parameters
from openrlhf.models.actor import Actor
from openrlhf.models.loading import load_causal_lm, load_sequence_model
from openrlhf.utils.tokenizer import generation_config_of, load_tokenizer
from tests.distributed.spawn import run_ranks
from tests.models.helpers import command, scores_of
from tests.tiny import make_model, make_tokenizer

KINDS = {
    "qwen2": ("qwen2", {}),
    "tied": ("qwen2", {"is_tied": True}),
    "mixtral": ("mixtral", {}),
    "bf16": ("llama", {}),
}
CASES = [("qwen2", 2), ("tied", 2), ("tied", 3), ("mixtral", 3), ("bf16", 3)]


def export_all(folder: Path) -> dict:
    """Export every kind of model from every stage; the names and tensors engines would be given."""
    given = {}
    for kind, stage in CASES:
        param_dtype = "bf16" if kind == "bf16" else "auto"
        strategy = DeepSpeedStrategy(DeepSpeedConfig(zero_stage=stage, param_dtype=param_dtype))
        strategy.setup()
        model = load_causal_lm(folder / kind, command(param_dtype=param_dtype))
        engine = strategy.prepare_train(Actor(model), OptimizerConfig(), num_updates=1)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder / kind)
        export_hf(model, tokenizer, out_dir(folder, kind, stage))
        given[kind, stage] = {n: t.clone() for n, t in stored_parameters(engine.module)}
    shut_down()
    return given


def out_dir(folder: Path, kind: str, stage: int) -> Path:
    return folder / f"{kind}-zero{stage}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export")
    for kind, (architecture, options) in KINDS.items():
        make_model(folder / kind, architecture, hidden_size=32, **options)
    for kind, stage in CASES:
        path = out_dir(folder, kind, stage)
        path.mkdir()
        (path / "metrics.jsonl").write_text("{}\n")
        (path / "model-00001-of-00002.safetensors").write_text("left by an older export")
    return folder


@pytest.fixture(scope="module")
def given(folder: Path) -> list[dict]:
    return run_ranks(export_all, 2, folder)


@pytest.mark.parametrize(("kind", "stage"), CASES)
def test_exports_and_what_engines_are_given_hold_every_weight(
    folder: Path, given: list[dict], kind: str, stage: int
) -> None:
    path = out_dir(folder, kind, stage)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not any(info.values())
    start = transformers.AutoModelForCausalLM.from_pretrained(folder / kind)
    dtype = torch.bfloat16 if kind == "bf16" else torch.float32
    for mine, theirs in zip(model.parameters(), start.parameters(), strict=True):
        assert mine.dtype == dtype
        assert torch.equal(mine, theirs.to(dtype))
    stored = load_file(folder / kind / "model.safetensors")
    for tensors in given:
        assert tensors[kind, stage].keys() == stored.keys()
        for name, tensor in tensors[kind, stage].items():
            assert torch.equal(tensor, stored[name].to(tensor.dtype))


def test_the_folder_keeps_its_logs_and_loses_stale_weights(folder: Path, given: list[dict]) -> None:
    path = out_dir(folder, "qwen2", 2)
    names = {file.name for file in path.iterdir()}
    assert names == {
        "README.md",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "metrics.jsonl",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    card = (path / "README.md").read_text()
    assert "Trained from `qwen2`" in card
    assert str(folder) not in card


MASTERS = [(stage, param_dtype) for stage in (0, 1, 2, 3) for param_dtype in ("bf16", "fp16")]
TINY_UPDATE = 2.0**-14  # of a weight of 1, below which bf16 moves by 2**-8, fp16 by 2**-11


def export_masters(folder: Path) -> None:
    """Add an update to every trained weight that bf16 is too coarse for, and export both."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "qwen2")
    for stage, param_dtype in MASTERS:
        strategy = DeepSpeedStrategy(DeepSpeedConfig(zero_stage=stage, param_dtype=param_dtype))
        strategy.setup()
        model = load_causal_lm(folder / "qwen2", command(param_dtype=param_dtype))
        model.lm_head.requires_grad_(False)
        optimizer = OptimizerConfig.model_validate({"adam": {"lr": TINY_UPDATE}})
        engine = strategy.prepare_train(Actor(model), optimizer, num_updates=10)
        loss = model(torch.arange(10)[None]).logits.float().square().mean()
        engine.backward(loss, is_last_micro_batch=True)
        engine.step()
        out = folder / f"masters-{param_dtype}-{stage}"
        export_hf(model, tokenizer, out, tensors=master_parameters(model))
        export_hf(model, tokenizer, out / "rounded")
    shut_down()


def test_export_fp32_keeps_updates_that_16_bits_round_away(folder: Path) -> None:
    run_ranks(export_masters, 2, folder)
    start = load_file(folder / "qwen2" / "model.safetensors")
    for stage, param_dtype in MASTERS:
        out = folder / f"masters-{param_dtype}-{stage}"
        kept, rounded = (
            load_file(out / "model.safetensors"),
            load_file(out / "rounded" / "model.safetensors"),
        )
        assert {t.dtype for t in kept.values()} == {torch.float32}
        dtype = torch.bfloat16 if param_dtype == "bf16" else torch.float16
        assert torch.equal(kept["lm_head.weight"], start["lm_head.weight"].to(dtype).float())
        norm = "model.norm.weight"  # all ones
        assert torch.equal(rounded[norm].float(), start[norm]), (stage, param_dtype)
        assert torch.allclose((start[norm] - kept[norm]).abs(), torch.tensor(TINY_UPDATE), rtol=0.1)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(out)
        assert loaded.dtype == torch.float32
        assert json.loads((out / "config.json").read_text())["dtype"] == "float32"


@pytest.fixture
def lora(folder: Path) -> peft.PeftModel:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "qwen2")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    return peft.get_peft_model(model, config)


def test_a_lora_model_is_exported_as_a_peft_adapter(folder: Path, lora: peft.PeftModel) -> None:
    strategy = DeepSpeedStrategy(DeepSpeedConfig())
    strategy.prepare_eval(lora)
    lora.requires_grad_(False)
    for name, parameter in lora.named_parameters():
        parameter.requires_grad_("lora_" in name)
    path = folder / "adapter"
    export_hf(lora, transformers.AutoTokenizer.from_pretrained(folder / "qwen2"), path)
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {f.name for f in path.iterdir()}
    base = transformers.AutoModelForCausalLM.from_pretrained(folder / "qwen2")
    loaded = peft.PeftModel.from_pretrained(base, path)
    token_ids = torch.arange(10)[None]
    torch.testing.assert_close(loaded(token_ids).logits, lora(token_ids).logits)


@pytest.mark.parametrize("is_adapter", [False, True])
@pytest.mark.parametrize(
    ("known", "written"), [(0, [0, 1]), ([0, 2], [0, 2, 1]), (1, 1), (None, [0, 1])]
)
def test_an_export_stops_at_the_token_that_ends_turns(
    tmp_path: Path, known: int | list[int] | None, written: int | list[int], *, is_adapter: bool
) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(make_model(tmp_path / "base"))
    tokenizer = make_tokenizer(tmp_path / "tokenizer")
    if known != 1:
        tokenizer.eos_token = "<|pad|>"  # as of a base model; turns end with <|end|>
    model.generation_config.eos_token_id = known
    if is_adapter:
        config = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, config)
    write_folder(model, model.state_dict(), tokenizer, tmp_path / "out")
    told = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert told["eos_token_id"] == written
    assert generation_config_of(str(tmp_path / "out")).eos_token_id == written
    if is_adapter:
        (tmp_path / "out" / "generation_config.json").unlink()  # then the base's counts
        assert generation_config_of(str(tmp_path / "out")).eos_token_id == 1


@pytest.mark.parametrize(
    ("given", "written"),
    [
        ({"temperature": 0.9}, {"do_sample": True, "temperature": 0.9}),
        ({"do_sample": False, "temperature": 0.9, "top_p": 0.6}, {"do_sample": False}),
        ({"do_sample": True, "top_p": 0.6}, {"do_sample": True, "top_p": 0.6}),
        # Transformers reads these, and refuses to write them.
        ({"do_sample": False, "top_k": 1}, {"do_sample": False}),
        ({"pad_token_id": -1}, {}),
        ({"early_stopping": True, "length_penalty": 2.0}, {}),
        ({"output_scores": True, "output_attentions": True}, {}),
        ({"epsilon_cutoff": 0.1, "top_h": 0.3}, {}),
    ],
)
def test_an_export_samples_as_the_model_it_was_made_from(
    tmp_path: Path, given: dict[str, object], written: dict[str, object]
) -> None:
    base = make_model(tmp_path / "base")
    (base / "generation_config.json").write_text(json.dumps(given))
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    write_folder(model, model.state_dict(), tokenizer, tmp_path / "out")
    told = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    kept = {n: v for n, v in told.items() if n in (*given, "do_sample")}
    assert kept == written
    assert told["eos_token_id"] == 1  # which the config did not name


def test_the_model_card_names_no_folder_of_the_machine() -> None:
    command = (
        "/home/bob/.venv/bin/openrlhf sft --pretrain /home/bob/models/qwen/ --save_path=/data/out "
        "--dataset /d/a.jsonl,/d/b.jsonl --eval_dataset ./held/out.jsonl org/name http://h:1/v1"
    )
    assert without_folders(command) == (
        "openrlhf sft --pretrain qwen --save_path=out --dataset a.jsonl,b.jsonl "
        "--eval_dataset ./held/out.jsonl org/name http://h:1/v1"
    )


TEXTS = ("a", "several words here", "two words")
# What a tokenizer that pads with the end of texts has beside it, embeddings to spare, and the pad
# token that the export has.
BASES = {
    "unknown": ({"unk_token": "a"}, 0, "a"),
    "first": ({"bos_token": "b"}, 0, "b"),
    "spare": ({}, 1, "<|pad|>"),
    "none": ({}, 0, None),
}


def make_base(path: Path, name: str) -> Path:
    """A language model of this kind, whose own config pads with the end of texts."""
    roles, num_spare, _ = BASES[name]
    make_tokenizer(path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    tokenizer.add_special_tokens({**roles, "pad_token": tokenizer.eos_token})
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.eos_token_id}
    size = len(tokenizer) + num_spare
    make_model(path, "llama", hidden_size=32, num_layers=1, vocab_size=size, **ends)
    tokenizer.save_pretrained(path)
    return path


@pytest.mark.parametrize("kind", BASES)
def test_an_export_scores_single_texts_and_padded_batches_as_the_trained_model(
    kind: str, tmp_path: Path
) -> None:
    base, path, pad = make_base(tmp_path / "base", kind), tmp_path / "reward", BASES[kind][2]
    trained = load_sequence_model(base)
    with torch.no_grad():
        trained.score.weight.normal_(std=0.3, generator=torch.Generator().manual_seed(1))
    own = load_tokenizer(str(base))
    export_hf(trained, own, path)
    assert trained.config.pad_token_id == own.eos_token_id  # the live model is as it was
    expected = scores_of(trained, [own(text + own.eos_token)["input_ids"] for text in TEXTS])

    model = transformers.AutoModelForSequenceClassification.from_pretrained(path).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    if pad is None:
        assert model.config.pad_token_id is None
    else:
        assert tokenizer.pad_token == pad
        assert model.config.pad_token_id == tokenizer.pad_token_id != tokenizer.eos_token_id
        assert tokenizer.pad_token_id < model.config.vocab_size
    texts = [text + own.eos_token for text in TEXTS]
    with torch.no_grad():
        single = [model(**tokenizer(text, return_tensors="pt")).logits[0, 0] for text in texts]
        torch.testing.assert_close(torch.stack(single), expected, atol=1e-5, rtol=1e-5)
        for side in ("right", "left") if pad else ():
            batch = tokenizer(texts, padding=True, padding_side=side, return_tensors="pt")
            scores = model(**batch).logits[:, 0]
            torch.testing.assert_close(scores, expected, atol=1e-5, rtol=1e-5)


OFFLOADED = {"frozen at home": {"offload": True}, "frozen at home, ZeRO-2": {"offload": True}}


class Tied(nn.Module):
    """An embedding that also is the head, a buffer, and a part in another type."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(40, 8)
        self.middle = nn.Linear(8, 8).float()
        self.head = nn.Linear(8, 40, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.full((8,), 0.5), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids) * self.scale.to(self.embed.weight.dtype)
        return self.head(torch.tanh(self.middle(hidden)))


def make_tied() -> Tied:
    model = Tied().bfloat16()
    model.middle.float()  # as PEFT leaves adapters
    return model


@contextmanager
def whole_moves() -> Iterator[list[int]]:
    """A block that notes how many parameters every `Module.to` moved."""
    moved: list[int] = []
    move = nn.Module.to

    def noted(self: nn.Module, *args: object, **options: object) -> nn.Module:
        moved.append(sum(p.numel() for p in self.parameters()))
        return move(self, *args, **options)

    nn.Module.to = noted  # type: ignore[method-assign]
    try:
        yield moved
    finally:
        nn.Module.to = move  # type: ignore[method-assign]


def load_all(folder: Path) -> dict[str, dict]:
    results = {}
    ids = torch.arange(10)
    for name in ("trained", "frozen", *OFFLOADED):
        stage = 2 if "ZeRO-2" in name else 3
        strategy = DeepSpeedStrategy(DeepSpeedConfig(zero_stage=stage, param_dtype="bf16"), seed=1)
        strategy.setup()
        if world_size() == 1 and name not in OFFLOADED:
            continue  # one rank splits nothing else
        with whole_moves() as moved:
            if name == "trained":
                engine = strategy.prepare_train(make_tied(), OptimizerConfig(), num_updates=1)
            else:
                engine = strategy.prepare_eval(make_tied(), **OFFLOADED.get(name, {}))
        with torch.no_grad():
            answer = engine(ids).float()
        module = engine.module
        results[name] = {
            "moved": moved,
            "answer": answer,
            "is_tied": module.head.weight is module.embed.weight,
            "held": [p.ds_tensor.numel() for p in module.parameters()],
            "dtypes": {p.dtype for p in module.parameters()},
            "full": {name: t.float().clone() for name, t in stored_parameters(engine.module)},
        }
    shut_down()
    return results


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_model_is_never_moved_as_a_whole_and_answers_as_before(
    tmp_path: Path, num_ranks: int
) -> None:
    with torch.no_grad():
        expected = make_tied().bfloat16()(torch.arange(10)).float()
    for results in run_ranks(load_all, num_ranks, tmp_path):
        for name, found in results.items():
            assert sum(found["moved"]) == 0, name
            assert torch.equal(found["answer"], expected), name
            assert found["is_tied"], name
            assert found["held"] == [320 // num_ranks, 64 // num_ranks, 8 // num_ranks], name
            assert found["dtypes"] == {torch.bfloat16}, name
            assert found["full"].keys() == {"embed.weight", "middle.weight", "middle.bias"}, name
