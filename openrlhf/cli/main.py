"""The console script `openrlhf`: finds the command and hands the rest of the line to it."""

import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import Any

from openrlhf.cli.runner import show, supervised, version_text
from openrlhf.config.methods import METHODS

# Sub-command -> module in openrlhf.cli, one line of help.
COMMANDS = {
    **{name: (f"train_{name}", method.about) for name, method in METHODS.items()},
    "ppo": ("train_ppo_ray", "reinforcement learning on Ray: PPO, REINFORCE++, RLOO, GRPO"),
    "ppo-local": ("train_ppo", "the same in the launching process(es), without Ray"),
    "replay": ("replay", "a step of an RL run again, with its loss token by token"),
    "eval": ("evaluate", "pass@1, pass@k and mean reward of models, with intervals"),
    "check": ("check", "what a command needs, and all that is wrong with it, without the run"),
    "doctor": ("doctor", "find faults of this machine or cluster, and say what to type"),
    "report": ("report", "curves, samples and settings of runs as a page"),
    "infer": ("batch_inference", "respond to prompts or score responses in bulk"),
    "serve-rm": ("serve_rm", "a reward model behind HTTP"),
    "merge-lora": ("lora_combiner", "merge an adapter into its base model"),
    "push": ("push", "a trained model to the Hugging Face hub"),
    "chat": ("interactive_chat", "talk to a model in the terminal"),
}
MIN_LIKENESS = 0.75  # of a word to a command that it may be meant for

USAGE = "\n".join(
    [
        "usage: openrlhf COMMAND [FLAGS]\n",
        *(f"  {name:<11} {text}" for name, (_, text) in COMMANDS.items()),
        "\nopenrlhf COMMAND --help: its flags that matter; --help all: all; --help WORD: about it",
        "openrlhf --version: the version",
    ]
)


def command_of(word: str) -> str:
    """Return the command that a word means, which may be the name of its module."""
    modules = {module: name for name, (module, _) in COMMANDS.items()}
    return modules.get(word.replace("-", "_"), word)


def command(name: str) -> Any:
    """Return the function that runs the command of this name, with its flags."""
    if name in METHODS:
        return supervised(name)
    return import_module(f"openrlhf.cli.{COMMANDS[name][0]}").main


def main(argv: Sequence[str] | None = None) -> None:
    """Run a sub-command; without one, say which there are."""
    name, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    known = command_of(name)
    if known in COMMANDS:
        command(known)(rest)
    elif name in ("-h", "--help"):
        show(USAGE)
    elif name == "--version":
        show(version_text())
    else:
        near = get_close_matches(name, COMMANDS, n=1, cutoff=MIN_LIKENESS)
        remedy = f"Type openrlhf {near[0]}." if near else f"Type one of these:\n{USAGE}"
        print(f"error: there is no command {name}. {remedy}", file=sys.stderr)
        raise SystemExit(2)


if __name__ == "__main__":
    main()
