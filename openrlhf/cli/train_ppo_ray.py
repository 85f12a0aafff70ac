"""`openrlhf ppo`: reinforcement learning on Ray."""

from openrlhf.cli.runner import Command, imported
from openrlhf.config.ppo import PPOConfig

main = Command(
    "openrlhf ppo",
    PPOConfig,
    imported("openrlhf.trainer.ppo_run:run_ppo_ray"),
    imported("openrlhf.trainer.check:check_ppo_ray"),
)

if __name__ == "__main__":
    main()
