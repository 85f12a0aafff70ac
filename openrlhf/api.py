"""Training and evaluation from Python: commands are functions, flags are keyword arguments.

    result = sft(pretrain="Qwen/Qwen2.5-0.5B", dataset="rows.jsonl", learning_rate=1e-5)

Names are flat or dotted flags; sections may be dicts, as in YAML. What is wrong raises ConfigError,
with a line for each problem. Examples: docs/python-api.md.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from openrlhf.cli.runner import start_problems
from openrlhf.config.cli import ConfigT, flag_table, leaves, parse_config, read_config
from openrlhf.config.evaluation import EvaluateConfig
from openrlhf.config.generation import GenerationRunConfig
from openrlhf.config.local_paths import path_notices
from openrlhf.config.methods import METHODS
from openrlhf.config.ppo import PPOConfig
from openrlhf.config.supervised import (
    DPOConfig,
    KDConfig,
    KTOConfig,
    PRMConfig,
    RMConfig,
    SFTConfig,
)
from openrlhf.distributed.topology import Topology
from openrlhf.errors import ConfigError
from openrlhf.rewards.function import CallableReward
from openrlhf.utils import stopping
from openrlhf.utils.callbacks import Callback
from openrlhf.utils.console import say_notices
from openrlhf.utils.framework_logs import put_back, quiet_frameworks
from openrlhf.utils.given_objects import as_paths, is_object
from openrlhf.utils.run_folder import METRICS_FILE
from openrlhf.utils.snapshots import with_snapshots
from openrlhf.utils.tracker import read_metrics

GIVEN = ("data", "model", "models", "runs")  # what a setting opens that may be an object
Reward = Callable[..., Any] | Sequence[Callable[..., Any]]
RLConfigT = TypeVar("RLConfigT", bound=GenerationRunConfig)

if TYPE_CHECKING:
    from openrlhf.commands.evaluate import Evaluation
    from openrlhf.commands.train_supervised import Recipe
    from openrlhf.trainer.ppo_trainer import PPOTrainer

quiet_frameworks()  # they read it when they are imported: at the first run


@dataclass(frozen=True)
class Result:
    """The metrics and the model of a finished run, read from its folder.

    Example: `Result(Path("out/sft")).metrics["gpt_loss"]` is the last loss of a run of `sft`.
    """

    run_dir: Path  # the run folder

    @property
    def model_path(self) -> Path:
        """Return the folder of the trained model, in Hugging Face format."""
        return self.run_dir

    @property
    def history(self) -> list[dict[str, float]]:
        """Return the records of metrics.jsonl: of logged steps and of evaluations."""
        return read_metrics(self.run_dir / METRICS_FILE)

    @property
    def metrics(self) -> dict[str, float]:
        """Return the last value of every metric."""
        return {name: value for record in self.history for name, value in record.items()}


class Method(Generic[ConfigT]):
    """A command as a function; `config` alone builds what it is called with."""

    def __init__(self, config_class: type[ConfigT]) -> None:
        self.config_class = config_class

    def config(self, **settings: object) -> ConfigT:
        """Return the config with these settings, checked as on the command line; raise ConfigError
        for all that is wrong. Where a command takes a path of data or of a model, `settings` may
        hold a data set, a list of rows, or (model, tokenizer).
        """
        settings = self._with_paths(settings)
        parsed = parse_config(
            self.config_class, (), settings=settings, more_problems=start_problems
        )
        os.environ.update(parsed.environment)
        is_main = Topology.from_env().is_main
        if is_main:
            say_notices([*parsed.notices, *path_notices(parsed.config)])
        return with_snapshots(parsed.config, is_shown=is_main)

    def _with_paths(self, settings: dict[str, object]) -> dict[str, object]:
        """Return settings with the paths of files for objects; those are beside the run folder."""
        table = flag_table(self.config_class)
        settings = dict(leaves(settings, whole=table))
        objects = {
            name: value
            for name, value in settings.items()
            if is_object(value) and any(o.opens in GIVEN for o, _ in table.get(name, ()))
        }
        if not objects:
            return settings
        rest = {name: value for name, value in settings.items() if name not in objects}
        output = attrgetter("ckpt.output_dir")(
            read_config(self.config_class, (), settings=rest).config
        )
        folder = Path(f"{output}_inputs")
        written = {name: as_paths(name, value, folder) for name, value in objects.items()}
        return {"ckpt.output_dir": output} | rest | written

    def _given(self, config: ConfigT | None, settings: Mapping[str, object]) -> ConfigT:
        """Return the config, or one of the settings; raise ConfigError for both, and for a config
        of another command.
        """
        if config is not None and not isinstance(config, self.config_class):
            kind = type(config).__name__
            raise ConfigError(
                f"A {kind} stands in place of a {self.config_class.__name__}. Give settings by "
                "name, as keyword arguments, or what `config` of this function returns."
            )
        if config is not None and settings:
            raise ConfigError(
                f"Settings stand beside a config, which is frozen: {', '.join(settings)}. Build "
                "the config with them."
            )
        return self.config(**settings) if config is None else config


class Supervised(Method[ConfigT]):
    """Supervised training with a recipe."""

    def __init__(self, name: str) -> None:
        """`name` is that of the command."""
        self.method = METHODS[name]
        super().__init__(self.method.config_class)  # type: ignore[arg-type]

    def __call__(
        self,
        config: ConfigT | None = None,
        /,
        *,
        trainer: "Recipe | None" = None,
        callbacks: Sequence[Callback] = (),
        **settings: object,
    ) -> Result:
        """Train with a config, or with settings. `trainer` is a subclass of the method's own."""
        config = self._given(config, settings)
        run = resolve_name("openrlhf.commands.train_supervised:run_supervised")
        recipe = _subclass_of(resolve_name(self.method.recipe), trainer)
        callbacks = _checked_callbacks(callbacks)
        with put_back(), stopping.listening():
            run(recipe, config, callbacks=callbacks)
        return Result(Path(config.ckpt.output_dir).resolve())


class Rewarded(Method[RLConfigT]):
    """A command whose samples are scored; `reward` is a function in a form of
    docs/reward-functions.md, called in this process, or several that are added with
    `reward_weights`.
    """

    def config(self, *, reward: Reward | None = None, **settings: object) -> RLConfigT:
        """Return the config; `reward` is the function that the run will be called with."""
        if reward is not None:
            if named := {"remote_rm_url", "reward.remote_url"} & {*settings}:
                raise ConfigError(f"reward stands beside {named.pop()}. Give one of them.")
            settings["remote_rm_url"] = f"callable:{getattr(reward, '__name__', 'reward')}"
        return super().config(**settings)

    def _given(
        self, config: RLConfigT | None, settings: Mapping[str, object], reward: Reward | None = None
    ) -> RLConfigT:
        if config is None and reward is not None:
            settings = {**settings, "reward": reward}
        return super()._given(config, settings)

    def _source(self, config: RLConfigT, reward: Reward | None) -> CallableReward | None:
        """Return the source that calls the functions; None where the config names one."""
        if reward is None:
            return None
        batch_size = config.rollout.micro_batch_size
        return CallableReward(reward, weights=config.reward.weights, batch_size=batch_size)


class Reinforcement(Rewarded[PPOConfig]):
    """Reinforcement learning, on Ray or in this process."""

    def __init__(self, run: str) -> None:
        """`run` is the function that does it, as `module:name`."""
        super().__init__(PPOConfig)
        self.run = run

    def __call__(
        self,
        config: PPOConfig | None = None,
        /,
        *,
        reward: Reward | None = None,
        trainer: "type[PPOTrainer] | None" = None,
        callbacks: Sequence[Callback] = (),
        **settings: object,
    ) -> Result:
        """Train with a config, or with settings. `trainer` is a subclass of PPOTrainer, or of
        PPOTrainerAsync with `async_train`; `reward` is a function in a form of
        docs/reward-functions.md, or several.
        """
        config = self._given(config, settings, reward)
        own_class = resolve_name("openrlhf.commands.train_rl:trainer_class")(config)
        trainer = _subclass_of(own_class, trainer)
        make_trainer = partial(trainer, callbacks=_checked_callbacks(callbacks))
        source, run = self._source(config, reward), resolve_name(self.run)
        with put_back(), stopping.listening():
            run(config, make_trainer, reward_source=source)
        return Result(Path(config.ckpt.output_dir).resolve())


class Evaluating(Rewarded[EvaluateConfig]):
    """The evaluation of models on data with labels."""

    def __call__(
        self,
        config: EvaluateConfig | None = None,
        /,
        *,
        reward: Reward | None = None,
        **settings: object,
    ) -> "list[Evaluation]":
        """Evaluate with a config, or with settings; return the measurements of each of `models`."""
        config = self._given(config, settings, reward)
        run = resolve_name("openrlhf.commands.evaluate:run_evaluation")
        with put_back(), stopping.listening():
            return run(config, reward_source=self._source(config, reward))


def _subclass_of(own_class: Any, trainer: Any) -> Any:
    """Return the trainer's class, by default the method's own; raise ConfigError for another's."""
    if trainer is None:
        return own_class
    if not (isinstance(trainer, type) and issubclass(trainer, own_class)):
        told = getattr(trainer, "__name__", repr(trainer))
        raise ConfigError(f"trainer is {told}. Give a subclass of {own_class.__name__}.")
    return trainer


def _checked_callbacks(callbacks: Sequence[Callback]) -> Sequence[Callback]:
    """Return callbacks; raise ConfigError for what a run would stumble over after its first step:
    a class, one that is not in a list, one of another library.
    """
    is_list = isinstance(callbacks, Sequence)
    if not is_list or not all(isinstance(each, Callback) for each in callbacks):
        raise ConfigError(
            f"callbacks is {callbacks!r}. Give a list of objects of classes that derive from "
            f"{Callback.__module__}.{Callback.__name__}."
        )
    return callbacks


sft = Supervised[SFTConfig]("sft")
rm = Supervised[RMConfig]("rm")
dpo = Supervised[DPOConfig]("dpo")
kto = Supervised[KTOConfig]("kto")
prm = Supervised[PRMConfig]("prm")
kd = Supervised[KDConfig]("kd")
ppo = Reinforcement("openrlhf.commands.train_rl:run_ppo_ray")
ppo_local = Reinforcement("openrlhf.commands.train_rl:run_ppo_local")
evaluate = Evaluating(EvaluateConfig)


def __getattr__(name: str) -> Supervised[Any]:
    """Return any other supervised method of the register."""
    if name not in METHODS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return Supervised(name)
