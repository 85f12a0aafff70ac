"""`openrlhf serve-rm`: a reward model behind HTTP."""

from openrlhf.cli.runner import Command, imported
from openrlhf.config.serving import ServeRewardConfig

main = Command(
    "openrlhf serve-rm", ServeRewardConfig, imported("openrlhf.commands.serve_rm:serve_rewards")
)

if __name__ == "__main__":
    main()
