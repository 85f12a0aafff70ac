"""`data.*` of every command that reads rows: what is known of them, and if they are trusted."""

from __future__ import annotations

from typing import Literal

from openrlhf.config.base import Base, option, switch


class CheckedDataConfig(Base):
    """Facts that the data is held against before a model is loaded, and how far it is trusted."""

    expect_rows: str | None = option(
        None,
        "Rows the data must have before --max_samples; of several data sets with commas.",
        "expect_rows",
    )
    expect_sha256: str | None = option(
        None, "SHA-256 of the data's file; of several files with commas.", "expect_sha256"
    )
    duplicate_ids: Literal["error", "keep"] = option(
        "error", "Rows of a data set with the same `id`: refused, or kept.", "duplicate_ids"
    )
    allow_special_tokens: bool = switch(
        "Control tokens spelled in plain-text columns are control tokens; false: text, for data "
        "that is not trusted. In messages they are always text.",
        "allow_special_tokens",
        default=True,
    )
