"""From what an agent asks for to what engines do: prompts and sampling parameters of one turn.

What an engine does not do is refused by name, never ignored: the trainer's log-probs are taken
with the run's temperature, and a sample drawn otherwise would silently be off-policy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from openrlhf.engines.base import SamplingSettings
from openrlhf.utils.agent import BadAnswerError, SamplingParams
from openrlhf.utils.tokenizer import TextEncoder

FIXED = ("temperature", "top_p", "repetition_penalty")  # those of the run
# What engines do without, and the values that ask for nothing.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "n": (None, 1),
    "best_of": (None, 1),
    "top_k": (None, 0, -1),
    "min_p": (None, 0),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "logit_bias": (None, {}),
    "bad_words": (None, []),
    "allowed_token_ids": (None,),
    "min_tokens": (None, 0),
    "ignore_eos": (None, False),
    "structured_outputs": (None,),
    "guided_decoding": (None,),
}


def first_params(sampling: SamplingSettings, max_length: int) -> SamplingParams:
    """What an episode starts with: the run's sampling, and all of the context to fill."""
    return SamplingParams(
        max_tokens=max_length,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        repetition_penalty=sampling.repetition_penalty,
        seed=sampling.seed,
    )


def turn_settings(
    params: object, run: SamplingSettings, *, room: int, encoder: TextEncoder
) -> SamplingSettings:
    """The run's settings with what a turn may choose itself; at most `room` tokens.

    `params` is SamplingParams of ours or of vLLM, a mapping, or None. Raises BadAnswerError.
    """
    wanted = named_values(params)
    for name in FIXED:
        value = wanted.get(name)
        if value is not None and value != getattr(run, name):
            raise BadAnswerError(
                f"sampling_params.{name} is {value!r}, and the run samples with "
                f"{getattr(run, name)}. Leave it as it is."
            )
    for name, values in NEUTRAL.items():
        if wanted.get(name) not in values:
            raise BadAnswerError(
                f"sampling_params.{name} is {wanted[name]!r}, which engines of a run do not do. "
                "Leave it out."
            )
    limit = wanted.get("max_tokens")
    if limit is not None and (not isinstance(limit, int) or limit < 1):
        raise BadAnswerError(f"sampling_params.max_tokens is {limit!r}. Use a number above 0.")
    stops = [*(wanted.get("stop_token_ids") or ()), *stop_ids(wanted.get("stop"), encoder)]
    seed = wanted.get("seed")
    return replace(
        run,
        num_samples=1,
        max_new_tokens=room if limit is None else min(limit, room),
        stop_token_ids=tuple(dict.fromkeys([*run.stop_token_ids, *stops])),
        seed=run.seed if seed is None else seed,
    )


def named_values(params: object) -> dict[str, Any]:
    """The parameters by name, as far as they are known here."""
    names = (*FIXED, *NEUTRAL, "max_tokens", "stop_token_ids", "stop", "seed")
    if isinstance(params, Mapping):
        return {name: params[name] for name in names if name in params}
    return {name: getattr(params, name) for name in names if hasattr(params, name)}


def stop_ids(stop: object, encoder: TextEncoder) -> list[int]:
    """Ids of stop texts, each of which must be one token; raises BadAnswerError for others."""
    if stop is None:
        return []
    texts: Sequence[object] = [stop] if isinstance(stop, str) else list(stop)  # type: ignore[call-overload]
    found = []
    for text in texts:
        ids = encoder.encode_segments([["\n", str(text)]])[0][1]
        if len(ids) != 1:
            raise BadAnswerError(
                f"the stop text {text!r} is {len(ids)} tokens, and engines stop at single tokens. "
                "Use stop_token_ids, or cut the text in the environment."
            )
        found += ids
    return found


def prompt_ids_of(
    prompt: object, encode: Callable[[str], list[int]]
) -> tuple[list[int], str | None]:
    """Token ids of a prompt in any of vLLM's forms, and its text where it was text; what is in a
    list is not looked at.
    """
    text = None
    if isinstance(prompt, Mapping):
        text = prompt.get("prompt")
        prompt = prompt.get("prompt_token_ids", text)
    if isinstance(prompt, str):
        return encode(prompt), prompt
    if isinstance(prompt, Sequence):
        return list(prompt), text
    if hasattr(prompt, "tolist"):  # a tensor or an array
        return list(prompt.tolist()), text
    raise BadAnswerError(
        f"generate was given a {type(prompt).__name__}. Give text, token ids or "
        '{"prompt_token_ids": ids}.'
    )
