"""An exported reward model scores single texts and padded batches as the trained one does, whatever
its base padded with.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from openrlhf.distributed.export import export_hf
from openrlhf.distributed.train_engine import EvalEngine
from openrlhf.models.loading import load_sequence_model
from openrlhf.models.value_head import RewardModel
from openrlhf.utils.packing import PackedBatch
from openrlhf.utils.tokenizer import load_tokenizer

EOS = "<|end|>"
TEXTS = ("a", "several words here", "two words")
# Special tokens of a base: which there are, what they are for, embeddings beyond them, and the pad
# token that the export has.
BASES = {
    "unknown": (["<unk>"], {"unk_token": "<unk>", "pad_token": EOS}, 0, "<unk>"),
    "first": (["<s>"], {"bos_token": "<s>"}, 0, "<s>"),
    "spare": ([], {"pad_token": EOS}, 1, "<|pad|>"),
    "none": ([], {}, 0, None),
}


def make_base(path: Path, name: str) -> Path:
    """A language model of this kind, whose own config pads with the end of texts."""
    special, roles, num_spare, _ = BASES[name]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([EOS, *special, *alphabet])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=EOS, additional_special_tokens=special, **roles
    )
    tokenizer.save_pretrained(path)
    config = transformers.LlamaConfig(
        vocab_size=len(vocab) + num_spare,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    return path


def trained_scores(model: torch.nn.Module, texts: list[list[int]]) -> torch.Tensor:
    ids = [torch.tensor(text) for text in texts]
    batch = PackedBatch.from_sequences(ids, [torch.zeros(len(i), dtype=torch.bool) for i in ids])
    with torch.no_grad():
        return RewardModel(model)(batch)


@pytest.mark.parametrize("kind", BASES)
def test_an_export_scores_single_texts_and_padded_batches_as_the_trained_model(
    kind: str, tmp_path: Path
) -> None:
    base, path, pad = make_base(tmp_path / "base", kind), tmp_path / "reward", BASES[kind][3]
    trained = load_sequence_model(base)
    with torch.no_grad():
        trained.score.weight.normal_(std=0.3, generator=torch.Generator().manual_seed(1))
    own = load_tokenizer(str(base))
    export_hf(EvalEngine(trained, torch.device("cpu")), trained, own, path, command="c")
    assert trained.config.pad_token_id == 0  # the live model is as it was
    expected = trained_scores(trained, [own(text + EOS)["input_ids"] for text in TEXTS])

    model = transformers.AutoModelForSequenceClassification.from_pretrained(path).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    if pad is None:
        assert model.config.pad_token_id is None
    else:
        assert tokenizer.pad_token == pad
        assert model.config.pad_token_id == tokenizer.pad_token_id != tokenizer.eos_token_id
        assert tokenizer.pad_token_id < model.config.vocab_size
    texts = [text + EOS for text in TEXTS]
    with torch.no_grad():
        single = [model(**tokenizer(text, return_tensors="pt")).logits[0, 0] for text in texts]
        torch.testing.assert_close(torch.stack(single), expected, atol=1e-5, rtol=1e-5)
        for side in ("right", "left") if pad else ():
            batch = tokenizer(texts, padding=True, padding_side=side, return_tensors="pt")
            scores = model(**batch).logits[:, 0]
            torch.testing.assert_close(scores, expected, atol=1e-5, rtol=1e-5)
