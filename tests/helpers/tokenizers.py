"""A tokenizer that begins texts with <s>, as those of Llama do."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

BOS, EOS = 0, 1
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
