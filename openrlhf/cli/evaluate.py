"""`openrlhf eval`: pass@1, pass@k and mean reward of models on data with labels."""

from openrlhf.cli.runner import Command, imported
from openrlhf.config.evaluation import EvaluateConfig

main = Command(
    "openrlhf eval",
    EvaluateConfig,
    imported("openrlhf.commands.evaluate:run_evaluation"),
    imported("openrlhf.commands.check:check_evaluation"),
)

if __name__ == "__main__":
    main()
