"""Loading a tokenizer, and the one way text becomes token ids.

Data cannot speak as another role: a special token spelled out in a message is tokenised as the
plain text it is, while the same token in a chat template or an input template keeps its meaning. So
it does in a column of plain text, unless that is not trusted. Knows nothing of columns or rows.
"""

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as OverdueError
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeAlias, cast

import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import GenerationConfig, PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template
from transformers.utils.hub import cached_file

from openrlhf.config.local_paths import is_template_text
from openrlhf.errors import ConfigError, first_line
from openrlhf.utils.adapter_folder import named_base
from openrlhf.utils.threads import start_thread

Tokenizer: TypeAlias = PreTrainedTokenizerBase

# Upstream annotates the pair (texts, spans) it returns as a string.
_render_jinja: Callable[..., tuple[list[str], list[list[tuple[int, int]]]]] = cast(
    Any, render_jinja_template
)
RENDER_S = 20.0  # for one dialogue: templates come with models, which nobody has to trust
# Stand-ins for special tokens found in data while a template is rendered around them: a character
# that no text is meant to hold, and a private one. Data that does hold it gets a stand-in, too.
_STAND_IN, _FIRST_LETTER = "\ufdd0", 0xF0000
# Never merges with what follows; takes the prefix space that a tokenizer puts before text.
_ANCHOR = "\n"
# Variables of a template that rows and commands set themselves.
OF_ROWS = frozenset({"messages", "tools", "chat_template", "add_generation_prompt"})


def load_tokenizer(
    name_or_path: str,
    *,
    chat_template: str | None = None,
    template_variables: str | None = None,
    trust_remote_code: bool = False,
) -> Tokenizer:
    """Load a tokenizer, with a pad token but never a new id (embeddings keep their size).

    `chat_template` replaces the tokenizer's own: Jinja text, or the path of a file that holds it.
    `template_variables` (JSON) become defaults in the template, so that an export has them, too.
    An adapter that was saved without a tokenizer has its base's.
    Raises ConfigError when there is no such folder or hub name, or when it needs code of its own.
    """
    name_or_path = _folder_with_tokenizer(name_or_path)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            name_or_path, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError, TypeError, KeyError, StrictDataclassError) as error:
        problem = f"cannot be loaded: {first_line(error)} Give a folder with tokenizer files, or a "
        problem += "hub name that can be reached."
        if "trust_remote_code" in str(error):
            problem = "runs code of its own. Add --trust_remote_code if you trust it."
        if isinstance(error, StrictDataclassError):  # of the model, not of the tokenizer
            reason = first_line(error)
            problem = f"needs config.json, which is wrong: {reason}. Copy the model again."
        raise ConfigError(f"tokenizer {name_or_path} {problem}") from error
    if len(tokenizer) == len(tokenizer.all_special_ids):  # made of no file at all
        raise ConfigError(
            f"{name_or_path} holds no tokenizer. Copy the files of the model's tokenizer into it "
            "(tokenizer.json, tokenizer_config.json), or give a folder that has them."
        )
    if (template := _processors_template(name_or_path)) is not None:
        tokenizer.chat_template = template
    if chat_template:
        if not is_template_text(chat_template):
            chat_template = Path(chat_template).expanduser().read_text(encoding="utf-8")
        tokenizer.chat_template = chat_template
    if template_variables:
        tokenizer.chat_template = _with_defaults(tokenizer, template_variables)
    if tokenizer.pad_token_id is None:
        own = tokenizer.eos_token or tokenizer.unk_token or tokenizer.bos_token
        tokenizer.pad_token = own or tokenizer.convert_ids_to_tokens(0)
    return tokenizer


def _processors_template(name_or_path: str) -> str | None:
    """Return the chat template of a model's processor, which knows its pictures, if there is one in
    a file of its own.
    """
    options: dict[str, Any] = {"_raise_exceptions_for_missing_entries": False}
    options["_raise_exceptions_for_connection_errors"] = False
    file = cached_file(name_or_path, "chat_template.json", **options)
    return None if file is None else json.loads(Path(file).read_text())["chat_template"]


def _with_defaults(tokenizer: Tokenizer, variables: str) -> str | dict[str, str]:
    """Return the chat template, or each of several, behind lines that set variables which are not
    given otherwise.
    """
    chat_template_of(tokenizer, for_tools=True)
    template = tokenizer.chat_template
    try:
        found = json.loads(variables)
    except json.JSONDecodeError:
        found = None
    if not isinstance(found, dict) or not all(map(str.isidentifier, found)):
        raise ConfigError(
            f"--chat_template_kwargs {variables} is no JSON object of variables. Type one such as "
            """'{"enable_thinking": false}'."""
        )
    if taken := OF_ROWS & found.keys():
        raise ConfigError(
            f"--chat_template_kwargs sets {min(taken)}, which rows do themselves. Leave it out."
        )
    if unread := [name for name in found if not names(str(template), name)]:
        raise ConfigError(
            f"--chat_template_kwargs sets {', '.join(unread)}, which the chat template of "
            f"{tokenizer.name_or_path} does not read. Leave it out."
        )
    head = "".join(
        f"{{% if {name} is not defined +%}}{{% set {name} = {value!r} +%}}{{% endif +%}}"
        for name, value in found.items()
    )
    if isinstance(template, str):
        return head + template
    return {name: head + text for name, text in template.items()}


def get_tokenizer(
    pretrain: str,
    model: Any = None,
    padding_side: str = "left",
    strategy: object = None,
    use_fast: bool = True,
) -> Tokenizer:
    """Load a tokenizer as OpenRLHF's function of this name does, and give its pad token to the
    `model`. It is a fast one whatever the others say.
    """
    tokenizer = load_tokenizer(pretrain)
    tokenizer.padding_side = padding_side
    if model is not None:
        model.config.pad_token_id = tokenizer.pad_token_id
    return tokenizer


def tokenizer_of(command: Any, path: str) -> Tokenizer:
    """Load the tokenizer of a model as the flags of a command say."""
    return load_tokenizer(
        path,
        chat_template=command.data.tokenizer_chat_template,
        template_variables=command.data.chat_template_kwargs,
        trust_remote_code=command.trust_remote_code,
    )


def eos_token_ids(
    model_name_or_path: str,
    tokenizer: Tokenizer,
    *,
    trust_remote_code: bool = False,
) -> tuple[int, ...]:
    """Return every id that ends a response: the tokenizer's, those of the generation config or
    the config, and the one that ends turns in the chat template.
    """
    own = _configured_eos(model_name_or_path, trust_remote_code)
    found = (tokenizer.eos_token_id, *own, turn_end_id(tokenizer))
    return tuple(dict.fromkeys(int(token_id) for token_id in found if token_id is not None))


def outside_vocabulary(token_ids: Iterable[object], vocab_size: int) -> list[object]:
    """Return the ids that are not in a vocabulary."""
    return [i for i in token_ids if not isinstance(i, int) or not 0 <= i < vocab_size]


def check_stop_ids(token_ids: Sequence[int] | None, vocab_size: int) -> None:
    """Raise ConfigError for ends of responses that a model can never sample."""
    if bad := outside_vocabulary(token_ids or (), vocab_size):
        raise ConfigError(
            f"--stop_token_ids {bad[0]} is no token of the model. Type ids of 0..{vocab_size - 1}."
        )


def names(template: str, name: str) -> bool:
    """Return True if a chat template has a word."""
    return re.search(rf"\b{re.escape(name)}\b", template) is not None


def turn_end_id(tokenizer: Tokenizer) -> int | None:
    """Return the special token that the chat template writes behind the assistant's words; None
    where it writes none.
    """
    mark = "ANSWER"
    for content in (mark, [{"type": "text", "text": mark}]):
        turns = [{"role": "user", "content": content}, {"role": "assistant", "content": content}]
        try:
            text, _ = render_chat(tokenizer, turns, template=chat_template_of(tokenizer))
        except (TemplateError, ConfigError):  # no template, or one that is refused where it is used
            continue
        if mark in text:
            ids = encode_text(tokenizer, text.rpartition(mark)[2], allow_special_tokens=True)
            return next((i for i in ids if i in special_ids(tokenizer)), None)
    return None


def special_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Return the ids of all tokens that are no text."""
    added = tokenizer.added_tokens_decoder.items()
    return frozenset(i for i, token in added if token.special) | {*tokenizer.all_special_ids}


def unused_sampling(model_name_or_path: str, chosen: Mapping[str, float]) -> list[str]:
    """Return the line that names settings of a model's generation config which are not used;
    `chosen` are those of the command.
    """
    if (given := generation_config_of(model_name_or_path)) is None:
        return []
    neutral = {"temperature": 1, "top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1}
    if chosen.get("temperature") == 0:  # greedy
        neutral = {"repetition_penalty": 1}
    elif given.do_sample is False:  # the model's own settings are greedy: they mean nothing
        del neutral["temperature"], neutral["top_p"]
    asked = {name: getattr(given, name) for name in neutral}
    unused = [n for n, v in asked.items() if v not in (None, chosen.get(n, neutral[n]))]
    if not unused:
        return []
    told = ", ".join(f"{name} {asked[name]:g}" for name in unused)
    may_follow = "top_k" in chosen  # training learns from the whole distribution
    flags = " ".join(f"--{name} {asked[name]:g}" for name in unused if may_follow)
    remedy = f". Type {flags} to use them" if flags else ""
    return [f"not used: {told} of the generation config of {model_name_or_path}{remedy}"]


def own_generation_config(name_or_path: str | os.PathLike[str]) -> GenerationConfig | None:
    """Return the generation config of a model or an adapter; None if it has none."""
    try:
        return GenerationConfig.from_pretrained(Path(name_or_path).expanduser())
    except OSError:
        return None


def generation_config_of(name_or_path: str) -> GenerationConfig | None:
    """Return the generation config of a model, or of an adapter or else its base; None if there is
    none.
    """
    own = own_generation_config(name_or_path)
    base = named_base(name_or_path) if own is None else None
    return own if base is None else generation_config_of(base)


def encode_text(
    tokenizer: Tokenizer, text: str, *, allow_special_tokens: bool = False
) -> list[int]:
    """Return the ids of a text, without BOS or EOS; special tokens spelled in it stay text unless
    they are allowed.
    """
    return tokenizer(
        text,
        add_special_tokens=False,
        split_special_tokens=not allow_special_tokens,
        return_attention_mask=False,
        verbose=False,
    )["input_ids"]


def decode_rest(
    tokenizer: Tokenizer, token_ids: Sequence[Sequence[int]], *, skip_special_tokens: bool
) -> list[str]:
    """Return the texts of ids that stand behind others. Decoded by themselves, SentencePiece drops
    the space that the first of them begins with.
    """
    anchor = encode_text(tokenizer, _ANCHOR)
    texts: list[str] = tokenizer.batch_decode(
        [anchor, *([*anchor, *ids] for ids in token_ids)], skip_special_tokens=skip_special_tokens
    )
    return [text[len(texts[0]) :] for text in texts[1:]]


class TokenTexts:
    """The text of single tokens, as they stand within a text; each is looked up once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # Behind other text, so that no tokenizer drops the space that a token begins with.
        self._anchor = encode_text(tokenizer, _ANCHOR)
        self._start = len(self._decode(self._anchor))
        self._known: dict[int, str] = {}

    def __call__(self, token_ids: Sequence[int]) -> list[str]:
        for token_id in set(token_ids) - self._known.keys():
            self._known[token_id] = self._decode([*self._anchor, token_id])[self._start :]
        return [self._known[token_id] for token_id in token_ids]

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, clean_up_tokenization_spaces=False))


def leading_token_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the ids that a tokenizer puts before any text (BOS for most); () if none."""
    bare = list(tokenizer("a", add_special_tokens=False)["input_ids"])
    full = list(tokenizer("a", add_special_tokens=True)["input_ids"])
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return tuple(full[:start])
    return ()


class TemplateError(ValueError):
    """A chat template refuses a dialogue; the message is the template's own."""


def chat_template_of(tokenizer: Tokenizer, *, for_tools: bool = False) -> str:
    """Return the chat template that is used: of several with names, `tool_use` where there are
    tools; raise ConfigError if there is none.
    """
    found, named = tokenizer.chat_template, ""
    if isinstance(found, Mapping):
        named = f" named default, only {', '.join(found)}"
        found = found.get("tool_use" if for_tools else "default") or found.get("default")
    if not found:
        raise ConfigError(
            f"tokenizer {tokenizer.name_or_path} has no chat template{named}. "
            "Give one with --tokenizer_chat_template, or leave --apply_chat_template out."
        )
    return found


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, object]],
    *,
    template: str,
    tools: Sequence[object] | None = None,
    variables: Mapping[str, object] | None = None,
    add_generation_prompt: bool = False,
    wants_spans: bool = False,
) -> tuple[str, list[tuple[int, int]]]:
    """Render a dialogue by a chat template, in a sandbox; return it and the spans that its
    generation markers enclose. `variables` are what the template reads besides messages and tools.

    Spans are (start, end) characters, empty unless wanted. Raises TemplateError.
    """
    import jinja2  # noqa: PLC0415 - transformers itself needs it for templates only

    render = partial(
        _render_jinja,
        [list(messages)],
        tools=list(tools) if tools else None,
        chat_template=template,
        return_assistant_tokens_mask=wants_spans,
        add_generation_prompt=add_generation_prompt,
        **{**tokenizer.special_tokens_map, **(variables or {})},
    )
    # In a thread that is left behind when it takes too long: the command ends with the error.
    rendered: Future[tuple[list[str], list[list[tuple[int, int]]]]] = Future()
    try:
        _refuse_powers(template)
        start_thread("template", lambda: rendered.set_result(render()), rendered.set_exception)
        texts, spans = rendered.result(RENDER_S)
    except OverdueError as error:
        raise ConfigError(
            f"the chat template takes longer than {RENDER_S:g} s to write one dialogue. "
            "Give another one with --tokenizer_chat_template."
        ) from error
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(
            f"the chat template does not parse: line {error.lineno}: {error}. Repair it, or give "
            "another one with --tokenizer_chat_template."
        ) from error
    except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, MemoryError) as error:
        raise TemplateError(str(error) or type(error).__name__) from error
    return texts[0], [(start, end) for start, end in spans[0]] if wants_spans else []


@lru_cache(maxsize=16)
def _refuse_powers(template: str) -> None:
    """Raise TemplateError for an operator that no dialogue needs and no time limit can stop."""
    import jinja2  # noqa: PLC0415 - transformers itself needs it for templates only

    if any(
        kind == "operator" and text == "**" for _, kind, text in jinja2.Environment().lex(template)
    ):
        raise TemplateError("it has the operator **")


class TextEncoder:
    """Turns rendered texts into ids; holds what must be known about a tokenizer to do so.

    A rendered text is a template's output around data that went through `hide`. Its pieces keep
    their order: what the template wrote may hold special tokens, what the data wrote may not.
    """

    def __init__(self, tokenizer: Tokenizer, *, allow_special_tokens: bool = False) -> None:
        self.tokenizer = tokenizer
        self.allow_special_tokens = allow_special_tokens  # in plain text
        self.num_spelled = 0  # texts of the data that spelled special tokens so far
        self.unread: set[str] = set()  # names of what was left out of dialogues so far
        self.leading_ids = leading_token_ids(tokenizer)
        self.special_ids = special_ids(tokenizer)
        self.end_ids = eos_token_ids(tokenizer.name_or_path, tokenizer)
        own = {tokenizer.eos_token_id, *_configured_eos(tokenizer.name_or_path)}
        # Ends turns in the template, and the model's own settings do not know it.
        new = [token_id for token_id in self.end_ids if token_id not in own]
        self.new_end = str(tokenizer.convert_ids_to_tokens(new[0])) if new else None
        texts = {str(tokenizer.added_tokens_decoder.get(i, "")) for i in self.special_ids}
        texts |= set(tokenizer.all_special_tokens)
        self._special_texts = sorted(filter(None, texts), key=len, reverse=True)
        self._stand_ins = {
            text: _STAND_IN + chr(_FIRST_LETTER + i)
            for i, text in enumerate([*self._special_texts, _STAND_IN])
        }
        self._originals = {stand_in: text for text, stand_in in self._stand_ins.items()}
        self._special_pattern = _any_of(self._special_texts)
        self._hidden_pattern = _any_of([*self._special_texts, _STAND_IN])
        ends = tokenizer.convert_ids_to_tokens(list(self.end_ids))
        self._end_pattern = _any_of([str(token) for token in ends])
        self._stand_in_pattern = re.compile(f"({_any_of(list(self._originals)).pattern})")
        self._adds_prefix_space = _adds_prefix_space(tokenizer)

    def hide(self, text: str) -> str:
        """Put a stand-in for every special token that the data spells."""
        if not self._hidden_pattern.search(text):
            return text
        self.num_spelled += self._special_pattern.search(text) is not None
        return self._hidden_pattern.sub(lambda match: self._stand_ins[match[0]], text)

    def plain(self, text: str) -> str:
        """Hide special tokens in the text of a column, unless they are allowed."""
        if not self.allow_special_tokens:
            return self.hide(text)
        self.num_spelled += self._special_pattern.search(text) is not None
        return text.replace(_STAND_IN, self._stand_ins[_STAND_IN])

    def reveal(self, text: str) -> str:
        """Replace stand-ins by what they stand for, as a person reads it."""
        return self._stand_in_pattern.sub(lambda match: self._originals[match[0]], text)

    def end_of_turn(self, text: str, start: int, end: int) -> int:
        """Return the place where inference would stop in a turn (start, end) of a rendered text:
        behind its first end token, which may stand right behind the turn. White space behind
        another special token that the template closes the turn with is left out too.
        """
        pattern = self._end_pattern
        if found := pattern.search(text, start, end) or pattern.match(text, end):
            return found.end()
        stripped = text[start:end].rstrip()
        is_closed = stripped.endswith(tuple(self._special_texts))
        return start + len(stripped) if is_closed else end

    def says_nothing(self, text: str) -> bool:
        """Return True if a rendered text is white space and special tokens of the template."""
        return not self._special_pattern.sub("", text).strip()

    def encode_prompt(self, text: str) -> list[int]:
        """Return the ids of a rendered prompt, with exactly one BOS where tokenizer or template
        adds one.
        """
        return self.with_leading_ids(self.encode_segments([text])[0])

    def with_leading_ids(self, token_ids: list[int]) -> list[int]:
        """Put the tokenizer's own beginning before the ids, unless they begin so already."""
        if tuple(token_ids[: len(self.leading_ids)]) == self.leading_ids:
            return token_ids
        return [*self.leading_ids, *token_ids]

    def last_ids(self, token_ids: list[int], limit: int) -> list[int]:
        """Return the last ids of a text, behind the tokenizer's own beginning, which stays."""
        num_leading = len(self.leading_ids)
        if len(token_ids) <= limit:
            return token_ids
        room = max(limit - num_leading, 1)
        return [*token_ids[:num_leading], *token_ids[num_leading:][-room:]]

    def encode_segments(self, segments: Sequence[str]) -> list[list[int]]:
        """Return the ids of every segment of a rendered text; they are encoded apart, so a boundary
        is never merged over.
        """
        encoded: list[list[int]] = []
        is_first = True
        for segment in segments:
            ids: list[int] = []
            for index, part in enumerate(self._stand_in_pattern.split(segment)):
                if part:
                    text, is_data = self._originals.get(part, part), bool(index % 2)
                    ids += self._encode(text, allow_special=not is_data, is_first=is_first)
                    is_first = False
            encoded.append(ids)
        return encoded

    def _encode(self, text: str, *, allow_special: bool, is_first: bool) -> list[int]:
        """Encode text; behind other text it lacks the space that some tokenizers put first."""
        encode = partial(encode_text, self.tokenizer, allow_special_tokens=allow_special)
        if is_first or not self._adds_prefix_space:
            return encode(text)
        anchor = encode_text(self.tokenizer, _ANCHOR)
        ids = encode(_ANCHOR + text)
        assert ids[: len(anchor)] == anchor, (
            f"tokenizer {self.tokenizer.name_or_path} merges a line break with what follows it"
        )
        return ids[len(anchor) :]


def _any_of(texts: list[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, texts)) or r"(?!)")


def _adds_prefix_space(tokenizer: Tokenizer) -> bool:
    ids = encode_text(tokenizer, "a")
    return tokenizer.convert_ids_to_tokens(ids)[0].startswith(("▁", "Ġ"))


def _folder_with_tokenizer(name_or_path: str) -> str:
    base = named_base(name_or_path)
    has_own = (Path(name_or_path).expanduser() / "tokenizer_config.json").is_file()
    return name_or_path if base is None or has_own else _folder_with_tokenizer(base)


def _configured_eos(model_name_or_path: str, trust_remote_code: bool = False) -> list[int | None]:
    """Return the ends of responses that a model's folder names."""
    config = generation_config_of(model_name_or_path)
    if config is None and (base := named_base(model_name_or_path)) is not None:
        return _configured_eos(base, trust_remote_code)
    if config is None:
        try:
            config = transformers.AutoConfig.from_pretrained(
                model_name_or_path, trust_remote_code=trust_remote_code
            ).get_text_config()
        except (OSError, ValueError):  # a folder that holds a tokenizer only
            return []
    eos = getattr(config, "eos_token_id", None)
    return list(eos) if isinstance(eos, (list, tuple)) else [eos]
