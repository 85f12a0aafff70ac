"""`openrlhf infer`: respond to prompts or score responses in bulk.

Which GPUs a rank sees whose engine takes some of its own is decided before torch is imported: CUDA
looks at the choice once, when a library first asks for a device, be it at its import.
"""

import os
from collections.abc import Sequence

from openrlhf.cli.runner import Command, Work, imported
from openrlhf.config.serving import BatchInferenceConfig
from openrlhf.distributed.topology import Topology
from openrlhf.errors import ConfigError
from openrlhf.utils.gpus import VISIBLE, visible_gpus


def load(config: BatchInferenceConfig) -> Work:
    """Leave a rank of generate_vllm the GPUs of its engine, then import the command."""
    topology = Topology.from_env(local_rank=config.local_rank)
    names = visible_gpus(os.environ)
    if config.eval_task == "generate_vllm" and topology.world_size > 1 and names:
        size = config.vllm.tensor_parallel_size or 1
        os.environ[VISIBLE] = ",".join(own_gpus(names, topology.local_rank, size))
    return imported("openrlhf.commands.infer:run_batch_inference")(config)


def own_gpus(names: Sequence[str], local_rank: int, size: int) -> Sequence[str]:
    """Return neighbours for each rank: of GPUs 4, 5, 6, 7 in engines of two, rank 1 has 6 and 7.
    Raise ConfigError if the machine has too few for this rank.
    """
    start, stop = local_rank * size, (local_rank + 1) * size
    if stop > len(names):
        raise ConfigError(
            f"The engines of {local_rank + 1} ranks or more need {stop} GPUs (--tp_size {size}), "
            f"and this machine has {len(names)}. Start {len(names) // size} ranks on it, or type a "
            "smaller --tp_size."
        )
    return names[start:stop]


main = Command("openrlhf infer", BatchInferenceConfig, load)

if __name__ == "__main__":
    main()
