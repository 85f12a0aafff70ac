"""What a family computes by itself is what it is trained on, or it is padded or refused."""

from pathlib import Path

import pytest
import torch
import transformers as hf
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from openrlhf.config.common import DeepSpeedConfig, LoraConfig
from openrlhf.config.supervised import SFTConfig
from openrlhf.errors import ConfigError
from openrlhf.models import own_numbers
from openrlhf.models.actor import Actor, PackedModel
from openrlhf.models.loading import (
    check_adapter,
    check_value_model,
    disable_dropout,
    load_causal_lm,
    load_config,
    load_sequence_model,
)
from openrlhf.models.support import refuse_unsupported
from openrlhf.models.value_head import RewardModel
from openrlhf.utils import packing
from openrlhf.utils.packing import PackedBatch, is_padded

SIZES = {
    **{"vocab_size": 200, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
WINDOW = {"sliding_window": 4}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
KINDS = {
    "nemotron": {},
    "phimoe": {"num_local_experts": 4, **WINDOW},
    "qwen2_moe": {**EXPERTS, "use_sliding_window": True, "max_window_layers": 0, **WINDOW},
    "hyperclovax": {"head_dim": 8, "logits_scaling": 0.125},
    "recurrent_gemma": {"lru_width": 32, "head_dim": 8, "logits_soft_cap": 5.0},
    "afmoe": {**EXPERTS, "head_dim": 8, **WINDOW},
}
LENGTHS = (13, 1, 30, 9)


def config_of(kind: str, **more: object) -> hf.PretrainedConfig:
    return hf.CONFIG_MAPPING[kind](**{**SIZES, **KINDS.get(kind, {}), **more})


def saved(kind: str, path: Path, auto: type = AutoModelForCausalLM, **more: object) -> Path:
    """A model whose every weight matters."""
    torch.manual_seed(0)
    model = auto.from_config(config_of(kind, **more))
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(std=0.15)
            else:
                weight.add_(torch.randn_like(weight) * 0.15)
    model.save_pretrained(path)
    return path


def sequences() -> tuple[list[torch.Tensor], PackedBatch]:
    torch.manual_seed(1)
    ids = [torch.randint(3, 200, (length,)) for length in LENGTHS]
    return ids, PackedBatch.from_sequences(ids, [torch.arange(len(each)) > 0 for each in ids])


@pytest.mark.parametrize("kind", KINDS)
def test_log_probs_of_a_row_are_those_of_each_sequence_alone(kind: str, tmp_path: Path) -> None:
    path = saved(kind, tmp_path)
    alone = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    ids, batch = sequences()
    with torch.no_grad():
        logits = [alone(each[None], use_cache=False).logits[0, :-1] for each in ids]
        found = Actor(load_causal_lm(path))(batch).logprobs
    expected = [x.log_softmax(-1).gather(-1, y[1:, None]) for x, y in zip(logits, ids, strict=True)]
    assert (found - torch.cat(expected)[:, 0]).abs().max() < 1e-4


@pytest.mark.parametrize("kind", ["nemotron", "phimoe"])
def test_scores_of_a_row_are_those_of_each_sequence_alone(kind: str, tmp_path: Path) -> None:
    path = saved(kind, tmp_path, AutoModelForSequenceClassification, num_labels=1)
    alone = AutoModelForSequenceClassification.from_pretrained(path, attn_implementation="eager")
    ids, batch = sequences()
    with torch.no_grad():
        expected = torch.cat([alone.eval()(each[None]).logits[0] for each in ids])
        found = RewardModel(load_sequence_model(path))(batch).scores
    assert (found - expected).abs().max() < 1e-4


@pytest.mark.parametrize("kind", ["nemotron", "phimoe"])
@pytest.mark.parametrize("is_large", [False, True])
@pytest.mark.parametrize("scores", [False, True])
def test_a_family_that_rows_are_too_much_for_is_found(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_large: bool, scores: bool
) -> None:
    """As for one that nobody knows yet: not padded."""
    monkeypatch.setattr(packing, "DEAF_FAMILIES", ())
    monkeypatch.setattr(packing, "FAMILIES_WITH_MASKS", ())
    seen = []
    if is_large:  # of four layers two are looked at
        monkeypatch.setattr(own_numbers, "MAX_WEIGHTS_ON_CPU", 1)
    states_at = PackedModel.states_at

    def noted(self: PackedModel, *args: object) -> object:
        seen.append(len(self.model.base_model.layers))
        return states_at(self, *args)

    monkeypatch.setattr(PackedModel, "states_at", noted)
    load = load_sequence_model if scores else load_causal_lm
    with pytest.raises(ConfigError, match="in a way of its own"):
        load(saved(kind, tmp_path))
    assert seen == [2 if is_large else 4]


def test_a_window_as_wide_as_any_sequence_needs_no_mask(tmp_path: Path) -> None:
    assert not is_padded(load_causal_lm(saved("phimoe", tmp_path, sliding_window=64)))


def test_a_family_that_draws_experts_in_training_is_refused_where_log_probs_are_compared() -> None:
    with pytest.raises(ConfigError, match="phimoe draws experts at random"):
        disable_dropout(AutoModelForCausalLM.from_config(config_of("phimoe")))


def test_a_config_that_makes_no_reward_model_is_one_line(tmp_path: Path) -> None:
    kind = ["LlamaForSequenceClassification"]
    config_of("llama", num_labels=1, architectures=kind, hidden_act="nope").save_pretrained(
        tmp_path
    )
    with pytest.raises(ConfigError, match=r"The config\.json of .* makes no model: KeyError"):
        check_value_model(load_config(str(tmp_path)), str(tmp_path))


def test_a_model_that_was_compared_is_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_numbers, "MAX_WEIGHTS_ON_CPU", 1)
    model = load_causal_lm(saved("mistral", tmp_path, sliding_window=16))
    assert len(model.model.layers) == 4 and model.config.sliding_window == 16
    assert model.config._attn_implementation == "openrlhf_packed" and not is_padded(model)


@pytest.mark.parametrize(
    ("kind", "rates"),
    [
        ("starcoder2", ("residual_dropout", "embedding_dropout", "attention_dropout")),
        ("bloom", ("hidden_dropout", "attention_dropout")),
        ("falcon", ("hidden_dropout", "attention_dropout")),
        ("mixtral", ("attention_dropout", "router_jitter_noise")),
    ],
)
def test_training_mode_changes_nothing_without_dropout(kind: str, rates: tuple[str, ...]) -> None:
    own = {"num_local_experts": 4} if kind == "mixtral" else {}
    model = AutoModelForCausalLM.from_config(config_of(kind, **own, **dict.fromkeys(rates, 0.3)))
    token_ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        expected = model.eval()(token_ids, use_cache=False).logits
        assert (model.train()(token_ids, use_cache=False).logits - expected).abs().max() > 1e-3
        disable_dropout(model)
        assert torch.equal(model.train()(token_ids, use_cache=False).logits, expected)


def test_a_classifier_that_reads_a_text_as_a_whole_is_refused_before_its_weights(
    tmp_path: Path,
) -> None:
    config = config_of(
        "deberta-v2", num_labels=1, architectures=["DebertaV2ForSequenceClassification"]
    )
    config.save_pretrained(tmp_path)
    for check in (
        lambda: check_value_model(load_config(str(tmp_path)), str(tmp_path)),
        lambda: load_sequence_model(tmp_path),
    ):
        with pytest.raises(ConfigError, match="family deberta-v2, whose classifiers are no causal"):
            check()


def test_experts_without_an_adapter_are_said(capsys: pytest.CaptureFixture) -> None:
    command = SFTConfig(ds=DeepSpeedConfig(lora=LoraConfig(rank=4)))
    for kind, is_said in (("qwen2_moe", True), ("mixtral", False)):
        check_adapter(
            config_of(kind, **({} if is_said else {"num_local_experts": 4})), command, scores=False
        )
        said = capsys.readouterr()
        line = "the experts of Qwen2MoeForCausalLM take no adapter"
        assert (line in " ".join((said.out + said.err).split())) == is_said


@pytest.mark.parametrize(
    ("kind", "settings", "said"),
    [
        ("apertus", {"tensor_parallel_size": 2}, "which DeepSpeed's AutoTP cannot split"),
        ("opt", {"attn_implementation": "flex_attention"}, "would see each other"),
        (
            "gpt_bigcode",
            {"ring_attn_size": 2, "cp_mode": "ulysses"},
            "1 heads, not a multiple of the 2 ranks",
        ),
    ],
)
def test_what_a_family_cannot_do_is_refused(kind: str, settings: dict, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        refuse_unsupported(config_of(kind), "m", DeepSpeedConfig(**settings))


def test_reentrant_passes_over_shared_keys_are_refused() -> None:
    config = config_of("gemma4_text", num_kv_shared_layers=2, head_dim=8, global_head_dim=8)
    actor = Actor(AutoModelForCausalLM.from_config(config))
    actor.gradient_checkpointing_enable(use_reentrant=False)
    with pytest.raises(ConfigError, match="share keys and values, and gradients would be wrong"):
        actor.gradient_checkpointing_enable(use_reentrant=True)
