"""`--help` of a command: every flag with its type, default and other names, rendered by tyro."""

from __future__ import annotations

import tyro

from openrlhf.config.run import CommandConfig

NOTES = """
Every flag has a dotted name and, after "Also", the names of older commands and of Hugging Face.
`-` and `_` are the same. A switch may stand alone or before true or false.

--config FILE.yaml  defaults from a file: the nested tree, dotted names or flat names; flags win
--debug             a traceback with every error
"""


def print_help(config_class: type[CommandConfig], name: str) -> None:
    """Print the help text of a command."""
    try:
        tyro.cli(
            config_class,
            prog=name,
            description=f"{config_class.__doc__}\n{NOTES}",
            args=["--help"],
            use_underscores=True,
            config=(tyro.conf.FlagCreatePairsOff,),
        )
    except SystemExit as done:
        assert not done.code, "tyro prints help and exits with 0"
