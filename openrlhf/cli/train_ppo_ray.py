"""`openrlhf ppo`: reinforcement learning on Ray."""

from openrlhf.cli.runner import Command, imported
from openrlhf.config.ppo import PPOConfig

main = Command(
    "openrlhf ppo",
    PPOConfig,
    imported("openrlhf.commands.train_rl:run_ppo_ray"),
    imported("openrlhf.commands.check:check_ppo_ray"),
)

if __name__ == "__main__":
    main()
