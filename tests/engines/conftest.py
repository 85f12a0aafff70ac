"""An engine and its model, which the tests of a folder share."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from openrlhf.engines.vllm_engine import VLLMEngine
from tests.engines.helpers import load, start


@pytest.fixture(scope="package")
def engine(tiny_model_dir: Path) -> Iterator[VLLMEngine]:
    """vLLM in this process, with the weights of `model`: whoever sends others sends these back."""
    engine = start(tiny_model_dir, enable_prefix_caching=True)
    yield engine
    engine.shutdown()


@pytest.fixture(scope="package")
def model(tiny_model_dir: Path) -> Any:
    """The model of `engine` in Hugging Face's hands; do not change it."""
    return load(tiny_model_dir)
