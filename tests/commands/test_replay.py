"""Numbers of a replayed step beside those of the run."""

from pathlib import Path

import pytest

from openrlhf.commands.replay import DumpedStep, compare
from openrlhf.trainer.ppo_updates import StepInputs
from openrlhf.trainer.ppo_utils.update_plan import UpdateResult
from openrlhf.utils.metrics import Metrics


@pytest.mark.parametrize(
    ("num_updates", "said"),
    [
        (1, "all 1 numbers are those of the run to the last bit"),
        (2, "1 of 2 numbers differ from the run's"),
    ],
)
def test_the_size_of_an_update_is_compared_where_the_state_of_adam_was_kept(
    num_updates, said, capsys
):
    inputs = StepInputs(global_step=2, kl_coef=0.0, num_texts=0, updates=[num_updates] * 2)
    before = {"actor_grad_norm": 1.5, "actor_update_ratio": 0.25}
    kept = DumpedStep(Path(), inputs, {}, before, None, [], {})
    again = Metrics()
    for name, value in (("actor_grad_norm", 1.5), ("actor_update_ratio", 0.5)):
        again.add(name, value, weight=1)
    compare(kept, {"actor": [UpdateResult(again)]}, None)
    found = capsys.readouterr().out
    assert found.splitlines()[-1] == said
    assert ("actor_update_ratio" in found) == (num_updates > 1)
