"""`openrlhf merge-lora`: an adapter merged into its base, written as a model of its own.

The merging itself and the format of the folder are others' business.
"""

from pathlib import Path

from openrlhf.config.serving import LoraCombinerConfig
from openrlhf.distributed.export import export_hf
from openrlhf.models.loading import merge_adapter
from openrlhf.utils.console import notice
from openrlhf.utils.tokenizer import load_tokenizer


def run_lora_combiner(config: LoraCombinerConfig) -> None:
    """Write the merged model, with its tokenizer, at `config.output_path`."""
    base, adapter = config.model_path, config.lora_path
    assert base and adapter and config.output_path, "they are needed"
    output = Path(config.output_path)
    has_own = (Path(adapter).expanduser() / "tokenizer_config.json").is_file()
    tokenizer = load_tokenizer(
        adapter if has_own else base, trust_remote_code=config.trust_remote_code
    )
    model = merge_adapter(base, adapter, config, is_rm=config.is_rm)
    export_hf(model, tokenizer, output)
    notice(f"merged model saved to {output}")
