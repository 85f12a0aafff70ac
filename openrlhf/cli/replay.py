"""`openrlhf replay RUN --step N`: a step of an RL run again, with its loss token by token."""

from openrlhf.cli.runner import Command, imported
from openrlhf.config.serving import ReplayConfig

main = Command("openrlhf replay", ReplayConfig, imported("openrlhf.commands.replay:run_replay"))

if __name__ == "__main__":
    main()
