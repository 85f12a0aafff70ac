"""lora_combiner: an adapter merged into its base, written as a model of its own.

The merging itself and the format of the folder are others' business.
"""

from __future__ import annotations

from pathlib import Path

from openrlhf.config.serving import LoraCombinerConfig
from openrlhf.distributed.export import export_hf
from openrlhf.models.loading import merge_adapter
from openrlhf.utils.logging import notice
from openrlhf.utils.tokenizer import Tokenizer, load_tokenizer


def run_lora_combiner(config: LoraCombinerConfig) -> None:
    """Write the merged model, with its tokenizer, at `config.output_path`."""
    base, adapter = config.model_path, config.lora_path
    assert base is not None and adapter is not None, "they are needed"
    assert config.output_path is not None, "they are needed"
    output = Path(config.output_path)
    tokenizer = tokenizer_of(config, base, Path(adapter).expanduser())
    model = merge_adapter(base, adapter, config, is_rm=config.is_rm)
    export_hf(model, tokenizer, output)
    notice(f"merged model saved to {output}")


def tokenizer_of(config: LoraCombinerConfig, base: str, adapter: Path) -> Tokenizer:
    """Return the tokenizer that was saved with the adapter, or else the base's."""
    has_own = (adapter / "tokenizer_config.json").is_file()
    path = str(adapter) if has_own else base
    return load_tokenizer(path, trust_remote_code=config.trust_remote_code)
