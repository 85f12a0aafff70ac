"""The tokenizer of tests of data sets: it is changed, so each test has its own."""

from pathlib import Path

import pytest

from openrlhf.utils.tokenizer import Tokenizer
from tests.tiny import make_tokenizer


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return make_tokenizer(tmp_path / "tokenizer")
