"""The text of --help: every flag in its group, with its values, its default and its names."""

from __future__ import annotations

from typing import Literal

import pytest

from openrlhf.config.base import Base, option, switch, walk
from openrlhf.config.cli import help_text
from openrlhf.config.common import CommandConfig
from tests.config.test_settings import CONFIGS


class WheelConfig(Base):
    """`wheel.*`: what it rolls on."""

    size: int = option(26, "Inches.", "wheel_size", meanings={"wheel.large": {"true": 29}}, gt=0)
    pressures: tuple[float, float] = option((2.5, 3.0), "Front and back, in bar.", flat=False)


class BikeConfig(CommandConfig):
    """Ride a bike."""

    kind: Literal["road", "city"] | None = option(None, "What it is made for.")
    has_bell: bool = switch("A bell.", "bell")
    gears: int = option(7, "How many.", env="BIKE_GEARS")
    words: str = option("ring\n", "What the bell says.")
    wheel: WheelConfig = WheelConfig()


EXPECTED = """\
general options:
  --use_ms                  ModelScope instead of the Hugging Face hub.
                            (default: false)
  --trust_remote_code       Run Python files that come with a model or
                            tokenizer. (default: false)
  --kind {road,city}|none   What it is made for. (default: none)
  --has_bell                A bell. Also --bell. (default: false)
  --gears INT               How many. Environment: BIKE_GEARS. (default: 7)
  --words STR               What the bell says. (default: ring\\n)

wheel options:
  `wheel.*`: what it rolls on.

  --wheel.size INT          Inches. Also --wheel_size --wheel.large. (default:
                            26)
  --wheel.pressures FLOAT FLOAT
                            Front and back, in bar. (default: 2.5 3.0)
"""


def test_flags_stand_in_groups_with_values_help_names_and_defaults():
    text = help_text(BikeConfig, "openrlhf bike")
    assert text.startswith("usage: openrlhf bike [-h] [OPTIONS]\n\nRide a bike.\n")
    assert text.endswith(EXPECTED), text


@pytest.mark.parametrize("config_class", CONFIGS)
def test_every_name_of_every_flag_is_in_the_help(config_class):
    text = help_text(config_class, "x", width=90)
    words = set(text.replace(".\n", "\n").replace(". ", " ").split())
    for leaf in walk(config_class):
        assert leaf.field.description.split()[0] in text
        assert {f"--{name}" for name, _ in leaf.names} <= words, leaf.path
    broken = [line for line in text.splitlines() if "{" not in line]  # choices stay on one line
    assert max(map(len, broken)) <= 104  # the notes at the top are not broken
