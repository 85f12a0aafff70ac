"""`openrlhf ppo-local`: reinforcement learning in the launching process(es), without Ray."""

from openrlhf.cli.runner import Command, imported
from openrlhf.config.ppo import PPOConfig

main = Command(
    "openrlhf ppo-local",
    PPOConfig,
    imported("openrlhf.commands.train_rl:run_ppo_local"),
    imported("openrlhf.commands.check:check_ppo_local"),
)

if __name__ == "__main__":
    main()
