"""Every rank and engine computes on the GPU that Ray gave it, whoever hides the others."""

import pytest
import ray

from openrlhf.errors import ConfigError
from openrlhf.trainer.ray import utils


@pytest.fixture
def usable(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs as torch would use them."""
    monkeypatch.setattr(utils, "check_torch_uses", lambda *_: None)


@pytest.mark.usefixtures("usable")
@pytest.mark.parametrize(
    ("given", "visible", "index"),
    [
        ([], None, 0),  # no GPU
        ([3], None, 3),  # RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES=1: all are seen
        (["3"], "3", 0),  # Ray hides the others
        (["6"], "4,5,6,7", 2),  # NOSET again, on a node that was given half of its GPUs
        (["GPU-ab"], "GPU-cd,GPU-ab", 1),
    ],
)
def test_a_rank_takes_its_own_gpu_of_those_it_sees(
    monkeypatch: pytest.MonkeyPatch, given: list[object], visible: str | None, index: int
) -> None:
    monkeypatch.setattr(ray, "get_gpu_ids", lambda: given)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert utils.own_gpu() == index


def test_a_gpu_that_torch_cannot_use_ends_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "get_gpu_ids", lambda: [0])
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"Ray gives out GPUs on node .*driver >= 580"):
        utils.own_gpu()
