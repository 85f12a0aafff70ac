"""`openrlhf check COMMAND FLAGS`: what a run would find out and take, without the run.

Exit code 0: nothing is wrong; 2: every problem is a line on stderr.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace

from openrlhf.cli.main import COMMANDS, command, command_of
from openrlhf.cli.runner import show
from openrlhf.config.methods import METHODS

CHECKED = (*METHODS, "ppo", "ppo-local", "eval")
USAGE = "\n".join(
    [
        "usage: openrlhf check COMMAND FLAGS\n",
        "Say what a command with these flags would train or evaluate, the memory and disk it",
        "takes, two rows as the model reads them and their rewards; and all that is wrong, in one",
        "list.",
        "Exit code 0: nothing is wrong. 2: something is.\n",
        *(f"  {name:<11} {COMMANDS[name][1]}" for name in CHECKED),
    ]
)


def main(argv: Sequence[str] | None = None) -> None:
    """Check the command that the first word names."""
    word, *flags = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    name = command_of(word)
    if name in CHECKED:
        replace(command(name), name=f"openrlhf check {name}")(flags, only_checks=True)
    elif word in ("-h", "--help"):
        show(USAGE)
    else:
        print(
            f"error: {word} is no command that can be checked. Type one of these:\n{USAGE}",
            file=sys.stderr,
        )
        raise SystemExit(2)


if __name__ == "__main__":
    main()
