"""`openrlhf push`: upload a trained model to the Hugging Face hub."""

from openrlhf.cli.runner import Command, imported
from openrlhf.config.serving import PushConfig

main = Command("openrlhf push", PushConfig, imported("openrlhf.distributed.hub:run_push"))

if __name__ == "__main__":
    main()
