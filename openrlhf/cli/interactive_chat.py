"""`openrlhf chat`: talk to a model in the terminal."""

from openrlhf.cli.runner import Command, imported
from openrlhf.config.serving import ChatConfig

main = Command("openrlhf chat", ChatConfig, imported("openrlhf.commands.chat:run_interactive_chat"))

if __name__ == "__main__":
    main()
