"""The supervised methods: each is a config class and a recipe, which this register finds.

Their modules are texts, because a recipe imports torch and `--help` does not. A config class may
stand beside its recipe.
"""

from dataclasses import dataclass
from pkgutil import resolve_name

from openrlhf.config.base import CommandConfig


@dataclass(frozen=True)
class Method:
    """A supervised method.

    Example: `Method("preference pairs", "openrlhf.config.supervised:DPOConfig",
    "openrlhf.trainer.dpo_trainer:DPOTrainer")`
    """

    about: str
    config: str  # module:name
    recipe: str  # module:name, of a subclass of BaseTrainer

    @property
    def config_class(self) -> type[CommandConfig]:
        """Import the config class."""
        return resolve_name(self.config)


METHODS = {  # by the name of the command
    "sft": Method(
        "supervised fine-tuning and continued pre-training",
        "openrlhf.config.supervised:SFTConfig",
        "openrlhf.trainer.sft_trainer:SFTTrainer",
    ),
    "rm": Method(
        "pairwise reward model",
        "openrlhf.config.supervised:RMConfig",
        "openrlhf.trainer.rm_trainer:RMTrainer",
    ),
    "dpo": Method(
        "preference optimisation on pairs: DPO, IPO, SimPO, ORPO",
        "openrlhf.config.supervised:DPOConfig",
        "openrlhf.trainer.dpo_trainer:DPOTrainer",
    ),
    "kto": Method(
        "preference optimisation on single good and bad responses",
        "openrlhf.config.supervised:KTOConfig",
        "openrlhf.trainer.kto_trainer:KTOTrainer",
    ),
    "prm": Method(
        "process reward model: a verdict on each step",
        "openrlhf.config.supervised:PRMConfig",
        "openrlhf.trainer.prm_trainer:PRMTrainer",
    ),
    "kd": Method(
        "knowledge distillation",
        "openrlhf.config.supervised:KDConfig",
        "openrlhf.trainer.kd_trainer:KDTrainer",
    ),
}
