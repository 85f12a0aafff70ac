"""GPUs that a machine shows and torch cannot use end the start in a line."""

import pytest
import ray
import torch

from openrlhf.errors import ConfigError
from openrlhf.trainer.ray import utils
from openrlhf.utils import gpus

TOO_OLD = (
    "The NVIDIA driver on your system is too old (found version 12040). Please update your GPU "
    "driver by downloading and installing a new version from the URL: http://www.nvidia.com/"
)


@pytest.fixture(autouse=True)
def two_unusable_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with two GPUs and too old a driver."""

    def init() -> None:
        raise RuntimeError(TOO_OLD)

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(gpus, "gpus_of_machine", lambda: ["0", "1"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)


def test_gpus_with_too_old_a_driver_are_refused_with_the_driver_that_is_needed() -> None:
    expected = r"2 GPU\(s\), and torch .* too old \(found version 12040\)\. .* driver >= 580, or"
    with pytest.raises(ConfigError, match=expected):
        gpus.check_gpus()


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_gpus_that_are_hidden_are_not_missed(monkeypatch: pytest.MonkeyPatch, hidden: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    gpus.check_gpus()


@pytest.mark.parametrize(
    "command",
    [
        "train_sft --pretrain m --dataset d --save_path {0}/run",
        "train_ppo --pretrain m --prompt_data d --remote_rm_url http://a --save_path {0}/run",
        "batch_inference --eval_task generate_vllm --pretrain m --dataset d --output_path {0}/o",
        "serve_rm --reward_pretrain m --port 0",
        "interactive_chat --pretrain m",
    ],
)
def test_no_command_falls_back_to_the_cpu(refuse, tmp_path, command: str) -> None:
    name, *words = command.format(tmp_path).split()
    code, said = refuse(name, words)
    assert code == 2
    assert "this machine has 2 GPU(s)" in said


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
