"""Who holds how much of a GPU, summed from the calls that a run with the documents' flags makes.

A run of tiny models notes its calls; `ledger` reads them as if the models were the real ones.
"""

import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from openrlhf.commands.rl_inputs import prepare_inputs
from openrlhf.commands.train_rl import _run, worker_classes
from openrlhf.config.cli import parse_config
from openrlhf.config.common import DeepSpeedConfig
from openrlhf.config.ppo import PPOConfig
from openrlhf.distributed import strategy
from openrlhf.distributed.folders import holding_folders
from openrlhf.distributed.strategy import ModelSize, effective_stage
from openrlhf.trainer.local_cluster import Cluster
from openrlhf.trainer.ppo_state import open_run
from openrlhf.trainer.ppo_trainer import PPOTrainer
from openrlhf.trainer.ppo_utils.demands import TRAINED_ROLES, RoleDemand
from tests.engines.receiving import ReceivingModel
from tests.tiny import make_model, make_reward_model, write_jsonl

ROOT = Path(__file__).resolve().parents[2]
Event = tuple[str, str]  # (role or "engine", what it does)

GB = 1e9
GPU = 80 * GB
CONTEXT = 0.6 * GB  # of CUDA, for each process
FORWARD = 13 * GB  # layers that are whole at a time, activations, logits in chunks
UPDATE = 20 * GB
GATHERED = 2 * GB  # parameters that are whole while weights are sent or saved
WORK = {"compute_logprobs": FORWARD, "compute_values": FORWARD, "compute_rewards": FORWARD}
WORK |= {"fit": UPDATE, "broadcast_to_vllm": GATHERED, "export": GATHERED}


@dataclass(frozen=True)
class Shape:
    """A model as the ledger sees it."""

    num_parameters: float
    largest: float  # numbers in its largest parameter


def ledger(
    events: Iterable[Event], config: PPOConfig, shapes: Mapping[str, Shape], devices: set[str]
) -> list[tuple[Event, float]]:
    """Bytes that roles (and the "engine") on one GPU of `devices` hold while each event happens."""
    num_ranks = config.actor.num_nodes * (config.actor.num_gpus_per_node or 1)
    offloaded = {"ref": config.ref.offload, "reward": config.reward.offload}
    held: Counter[Event] = Counter()  # (who, what) -> bytes
    weights = 2 * shapes["actor"].num_parameters / config.vllm.tensor_parallel_size
    of_engine = {"weights": weights, "kv_cache": config.vllm.gpu_memory_utilization * GPU - weights}
    held.update({("engine", part): size for part, size in of_engine.items()})
    sums = []
    for event in events:
        role, what = event
        shape = shapes.get(role)
        if role == "engine":
            for part in of_engine if what == "sleep" else (what,):
                held["engine", part] = 0 if what == "sleep" else of_engine[part]
        elif what == "empty":
            held[role, "cached"] = 0
        elif what != "done":
            share = shape.num_parameters / num_ranks
            if what == "init_model":
                held[role, "context"] = CONTEXT
                held[role, "weights"] = 0 if offloaded.get(role) else 2 * share
            if what in ("init_model", "reload_states") and role in TRAINED_ROLES:
                # Gradients, master weights and two moments, fp32; or the gradients on their way.
                held[role, "states"] = (0 if config.ds.adam_offload else 16) * share
            if what == "offload_states":
                held[role, "states"] = 0
            work = WORK | {"whole": 2 * shape.num_parameters, "init_model": 4 * shape.largest}
            held[role, "cached"] = max(held[role, "cached"], work.get(what, 0))
        sums.append((event, sum(size for (who, _), size in held.items() if who in devices)))
    return sums


class Run:
    """Workers in this process, and a note of who is called when."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.at_work: str | None = None  # the role whose method runs

    def cluster(self, config: PPOConfig) -> Cluster:
        groups = {}
        for role, kind in worker_classes(config).items():
            worker = kind(config, role, config.ckpt.output_dir)
            worker.setup()
            groups[role] = Group(role, worker, self)
        path = config.actor.model_name_or_path
        assert path is not None
        engines = [NotedEngine(ReceivingModel(path, torch.bfloat16), self.events)]
        demands = [RoleDemand(role, 1, role) for role in [*groups, "vllm"]]
        return Cluster(demands, None, torch.bfloat16, groups, engines)  # type: ignore[arg-type]


class Group:
    """One rank of a role; it works when it is waited for, as late as a process may."""

    num_shares = 1

    def __init__(self, role: str, worker: Any, run: Run) -> None:
        self.role, self.worker, self.run = role, worker, run

    def start(
        self, method: Callable[..., Any], shares: Sequence[tuple[Any, ...]]
    ) -> Callable[[], list[Any]]:
        self.run.events.append((self.role, method.__name__))

        def work() -> list[Any]:
            self.run.at_work = self.role
            [share] = shares
            answer = self.worker.run(method.__name__, *share)
            self.run.at_work = None
            self.run.events.append((self.role, "done"))
            return [answer]

        return work

    def call(self, method: Callable[..., Any], *args: object) -> list[Any]:
        return self.start(method, [args])()


class NotedEngine:
    """An engine that notes when it sleeps."""

    who = "the engine"
    is_up = True

    def __init__(self, engine: ReceivingModel, events: list[Event]) -> None:
        self.engine, self.events = engine, events

    def __getattr__(self, name: str) -> Any:
        if name == "stream":  # a number of the engine's, here a method's name
            raise AttributeError(name)
        return getattr(self.engine, name)

    def call(self, method: Callable[..., Any], *args: object) -> Any:
        return getattr(self, method.__name__)(*args)

    def sleep(self) -> None:
        self.events.append(("engine", "sleep"))

    def wake_up(self, tag: str) -> None:
        self.events.append(("engine", tag))


SMALL = (
    "--rollout_batch_size 2 --n_samples_per_prompt 2 --train_batch_size 4 --max_samples 2 "
    "--micro_train_batch_size 2 --micro_rollout_batch_size 2 --prompt_max_len 64 "
    "--generate_max_len 3 --eval_steps -1 --input_key input"
)


def command_of(document: str, part: str) -> list[str]:
    """The flags of the RL command with `part` in a document."""
    text = (ROOT / document).read_text().replace("${EXTRA_ARGS:-}", "")
    for command in re.findall(r"openrlhf\.cli\.train_ppo_ray \\\n((?:.*\\\n)*.*)", text):
        if part in command:
            defaults = dict(re.findall(r"^(\w+)=\$\{\w+:-(\w+)\}", text, re.MULTILINE))
            for name, value in defaults.items():
                command = command.replace(f'"${name}"', value)
            return shlex.split(command.replace("\\\n", " "))
    raise AssertionError(part)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("memory")
    make_model(root / "model", num_layers=1)
    make_reward_model(root / "reward", num_layers=1)
    write_jsonl(root / "rows.jsonl", [{"input": f"{i}", "answer": "1"} for i in range(2)])
    return root


def run_of(
    words: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[PPOConfig, list[Event]]:
    """The configuration of a command, and what a run of it calls when its models are tiny."""
    paths = {"pretrain": "model", "prompt_data": "rows.jsonl", "save_path": "run", "ckpt_path": "c"}
    optional = {"reward_pretrain": "reward", "eval_dataset": "rows.jsonl"}
    paths |= {name: path for name, path in optional.items() if f"--{name}" in words}
    more = [word for name, path in paths.items() for word in (f"--{name}", str(folder / path))]
    asked = parse_config(PPOConfig, words).config
    config = parse_config(PPOConfig, [*words, *SMALL.split(), *more]).config
    run = Run()
    move = nn.Module.to

    def noted(what: str) -> None:
        if run.at_work is not None:
            run.events.append((run.at_work, what))

    def noted_move(module: nn.Module, *args: object, **options: object) -> nn.Module:
        if sum(p.numel() for p in module.parameters()) > 10_000:
            noted("whole")
        return move(module, *args, **options)

    inputs = prepare_inputs(config, has_engines=False)

    def of_many(ds: DeepSpeedConfig, size: ModelSize) -> int:
        return effective_stage(ds, replace(size, num_copies=8))  # this process is one of them

    monkeypatch.setattr(strategy, "effective_stage", of_many)
    monkeypatch.setattr(nn.Module, "to", noted_move)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: noted("empty"))
    with holding_folders(config.ckpt):
        _run(config, inputs, run.cluster(config), open_run(config, inputs), PPOTrainer)
    return asked, run.events


def overlapping(events: Sequence[Event]) -> set[tuple[str, ...]]:
    """Roles that were loading at the same time."""
    loading: list[str] = []
    found = set()
    for role, what in events:
        if what == "init_model":
            loading.append(role)
            found.add(tuple(loading))
        elif what == "done":
            with suppress(ValueError):
                loading.remove(role)
    return found


QWEN_7B = Shape(7.6e9, 152_064 * 3584)
LLAMA_70B, LLAMA_8B = Shape(70.6e9, 128_256 * 8192), Shape(8e9, 128_256 * 4096)


def test_the_hybrid_command_of_the_ppo_page_fits_into_80_gb(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = command_of("docs/methods/ppo.md", "--reward_pretrain")
    config, events = run_of(words, folder, monkeypatch)
    roles = {"actor", "ref", "critic", "reward"}
    sums = ledger(events, config, dict.fromkeys(roles, QWEN_7B), roles | {"engine"})
    event, most = max(sums, key=lambda pair: pair[1])
    assert 0.4 * GPU < most < GPU, f"{most / GB:.0f} GB in {event}"
    # Engines sleep before anything is loaded, and what shares a GPU loads in turn.
    assert events[0] == ("engine", "sleep")
    assert overlapping(events) == {(role,) for role in roles}
    assert ("fit", True) in {(what, role == "actor") for role, what in events}


def test_the_70b_script_fits_into_80_gb(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = command_of("examples/scripts/train_ppo_llama_ray_70b.sh", "--pretrain")
    config, events = run_of(words, folder, monkeypatch)
    shapes = {"actor": LLAMA_70B, "ref": LLAMA_70B, "critic": LLAMA_8B, "reward": LLAMA_8B}
    for pool in ({"actor", "ref"}, {"critic", "reward"}):
        event, most = max(ledger(events, config, shapes, pool), key=lambda pair: pair[1])
        assert most < GPU, f"{most / GB:.0f} GB in {event}"
    # Roles with GPUs of their own do not wait for each other.
    assert overlapping(events) == {("actor",), ("actor", "reward"), ("ref",), ("ref", "critic")}
