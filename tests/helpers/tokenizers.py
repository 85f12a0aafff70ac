"""Tokenizers that begin texts with <s> or with a space, as those of Llama do."""

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

BOS, EOS = 0, 1
SENTENCE_PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
TURNS = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"


def bos_tokenizer(
    *,
    adds_bos: bool,
    template_adds_bos: bool = False,
    prefix_space: bool = False,
    merged: tuple[tuple[str, str], ...] = (),
):
    """A byte-level tokenizer with <s> = 0 and </s> = 1 and no pad token; pairs of bytes that are
    `merged` are one token.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = map("".join, merged)
    vocab = {token: index for index, token in enumerate(["<s>", "</s>", *alphabet, *pairs])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[*merged]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    core.decoder = decoders.ByteLevel()
    if adds_bos:
        core.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", BOS)]
        )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = ("{{ bos_token }}" if template_adds_bos else "") + TURNS
    return tokenizer


def sentence_piece_tokenizer():
    """A tokenizer as Llama 2 has it: a space before each text, written as ▁, which decoding takes
    away; bytes where no letter fits.
    """
    letters = ["▁", *"abcdefghijklmnopqrstuvwxyz", "▁p"]
    vocab = {piece: index for index, piece in enumerate([*SENTENCE_PIECES, *letters])}
    core = Tokenizer(
        models.BPE(
            vocab=vocab, merges=[("▁", "p")], unk_token="<unk>", fuse_unk=True, byte_fallback=True
        )
    )
    core.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    core.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
