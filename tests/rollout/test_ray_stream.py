"""A stream over engines in other processes, and weights that change under it."""

from __future__ import annotations

import pytest
import torch

from openrlhf.engines.base import SamplingSettings
from openrlhf.engines.vllm_engine import VLLMEngineConfig
from openrlhf.errors import EngineError
from openrlhf.rollout.rollout import FinishedGroup
from openrlhf.rollout.scoring import FailurePolicy, GroupScorer, SourceScorer
from openrlhf.trainer.ray.placement import RoleDemand, place, view_cluster
from openrlhf.trainer.ray.vllm_engine import create_vllm_engines
from openrlhf.trainer.ray.weight_sync import WeightTransport
from tests.engines.helpers import load, shake, weights
from tests.rollout.agent_fakes import prompts
from tests.rollout.stream_fakes import DrivenStream, HeldSource, fetch, rollouts_of, until
from tests.rollout.test_agent_engines import largest_gap


@pytest.fixture
def engines(ray_cluster, tiny_model_dir, tmp_path):
    import ray
    from ray.util.placement_group import remove_placement_group

    slots = place([RoleDemand("vllm", 2, "vllm")], view_cluster())["vllm"]
    config = VLLMEngineConfig(
        str(tiny_model_dir), dtype="float32", max_model_len=512, max_num_seqs=32
    )
    engines = create_vllm_engines(config, slots, run_dir=str(tmp_path))
    for engine in engines:
        engine.ready()
    yield engines
    for engine in engines:
        ray.kill(engine.handle)
    remove_placement_group(slots[0].group)


@pytest.mark.slow
def test_engines_of_other_processes_stream_and_take_weights_under_way(
    engines, tiny_model_dir, tiny_tokenizer, tmp_path
):
    import ray

    scorer = GroupScorer(SourceScorer(HeldSource(), 4), FailurePolicy(4))
    rollouts = rollouts_of(engines, scorer, tiny_tokenizer, vocab_size=len(tiny_tokenizer))
    stream = DrivenStream(rollouts, SamplingSettings(num_samples=2, max_new_tokens=300))
    records = prompts(tiny_tokenizer, [f"prompt {k}" for k in range(6)])
    groups: list[FinishedGroup] = []

    def come() -> int:
        groups.extend(stream.finished(0.1))
        return len(groups)

    for record in records[:4]:
        stream.submit([((0, record.row_id), record)], tag="t")
    until(come)
    assert len({int(v) for g in groups for r in g.rollouts for v in r.weight_versions}) == 1
    assert largest_gap(tiny_model_dir, groups[0].rollouts, 1.0) < 1e-3
    stream.submit([((0, 4), records[4])], tag="t")
    trained = load(tiny_model_dir)
    shake(trained, 1)
    transport = WeightTransport("handles", torch.device("cpu"), engines)
    transport.send(weights(trained), 1, keep_running=True)
    stream.submit([((0, 5), records[5])], tag="t")
    until(lambda: come() == 6)
    samples = {group.key[1]: group.rollouts for group in groups}
    assert sorted(samples) == list(range(6))
    versions = [r.weight_versions.tolist() for row in range(6) for r in samples[row]]
    assert all(found == sorted(found) for found in versions)
    assert any(found[0] == 0 and found[-1] == 1 for found in versions[8:10])  # sampled meanwhile
    assert versions[10] == versions[11] == [1] * 300
    save(trained, tiny_tokenizer, tmp_path / "new")
    assert largest_gap(tmp_path / "new", samples[5], 1.0) < 1e-3
    assert stream.take_metrics()["num_generated_tokens"] == 6 * 2 * 300

    stream.submit([((1, 0), records[0])], tag="u")  # goes to the first engine: both are idle
    ray.kill(engines[0].handle)
    with pytest.raises(EngineError, match=r"vllm-0 .*died"):
        fetch(stream, 1)
    stream.close()


def save(model, tokenizer, path) -> None:
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
