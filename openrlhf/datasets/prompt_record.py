"""One prompt, as controller, engines and agents hand it on: a module that imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class PromptRecord:
    """One prompt as the engines get it."""

    row_id: int  # index of the row in the data set, before anything was dropped
    prompt_text: str
    prompt_token_ids: tuple[int, ...]
    label: object = ""  # without --label_key
    datasource: str = "default"
    columns: dict[str, object] = field(default_factory=dict)  # the row's other columns
    source: object = None  # the prompt as its row has it: text, or messages
