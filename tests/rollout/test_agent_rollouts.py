"""Agents in the place of the samples generator: rollouts of whole groups, failures by policy."""

import re
from dataclasses import replace

import pytest
import torch
import transformers

from openrlhf.algorithms.advantages import estimator
from openrlhf.config.ppo import PPOConfig
from openrlhf.engines.base import Completion
from openrlhf.errors import EngineError, LostRankError
from openrlhf.models.actor import Actor
from openrlhf.models.loading import load_causal_lm
from openrlhf.rollout.scoring import FailurePolicy
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ppo_utils.experience_maker import experience_metrics, penalised_rewards
from openrlhf.utils.agent import AgentError
from tests.helpers.updates import planned_shares
from tests.rollout.agent_fakes import (
    TWO_TURNS,
    StreamingEngine,
    agents_over,
    prompts,
    says,
    settings,
)
from tests.rollout.stream_fakes import DrivenStream, fetch


def generate(tmp_path, tokenizer, texts, *, policy=None, say=None, code=TWO_TURNS, **sampling):
    """The samples of some prompts."""
    engine = StreamingEngine(say or says(tokenizer, "yo"), delay_s=0.01)
    with agents_over([engine], tmp_path, tokenizer, policy=policy, code=code) as generator:
        return generator.generate_samples(
            prompts(tokenizer, texts), settings(tokenizer, **sampling), tag="step1"
        )


def test_rollouts_come_prompt_by_prompt_with_all_that_training_needs(tmp_path, tiny_tokenizer):
    batch = generate(tmp_path, tiny_tokenizer, ["a", "abc"], num_samples=2)
    names = [r.sample_id for r in batch.rollouts]
    assert names == ["step1/1/0", "step1/1/1", "step1/2/0", "step1/2/1"]
    assert [r.group_id for r in batch.rollouts] == [0, 0, 1, 1]
    assert [r.reward for r in batch.rollouts] == [0.5, 0.5, 1.5, 1.5]
    rollout = batch.rollouts[2]
    assert (rollout.prompt_text, rollout.label, rollout.columns) == ("abc", "label 1", {"row": 1})
    assert rollout.response_text == "yo<|end|>??yo<|end|>"
    assert tiny_tokenizer.decode(rollout.token_ids) == "abc" + rollout.response_text
    assert rollout.action_mask.tolist() == [False] * 3 + [True] * 3 + [False] * 2 + [True] * 3
    assert rollout.num_actions == len(rollout.logprobs) == len(rollout.weight_versions) == 6
    values = batch.metrics.values()
    assert values["num_generated_tokens"] == 24
    assert (values["agent/num_turns"], values["agent/num_segments"]) == (2, 1)
    assert (values["score"], values["extra/num"]) == (1, 3)
    assert batch.failed == {}


def test_each_turn_has_a_seed_of_its_own_where_there_is_a_seed(tmp_path, tiny_tokenizer):
    def seeds() -> dict[str, int]:
        asked = {}

        def say(request):
            asked[request.request_id] = request.sampling.seed
            return [tiny_tokenizer.eos_token_id]

        generate(tmp_path, tiny_tokenizer, ["a", "b"], say=say, num_samples=2, seed=1)
        return asked

    first = seeds()
    turns = [f"step1/{row}/{k}/t{turn}" for row in (1, 2) for k in (0, 1) for turn in (1, 2)]
    assert sorted(first) == turns and len(set(first.values())) == 8
    assert seeds() == first


def test_an_episode_that_is_tried_again_draws_other_numbers(tmp_path, tiny_tokenizer):
    asked = []

    def say(request):
        asked.append((request.request_id, request.sampling.seed))
        return [tiny_tokenizer.eos_token_id]

    code = TWO_TURNS.replace("first.prompt_token_ids", "first.missing")  # fails behind a turn
    policy = FailurePolicy(4, num_retries=1, drops=True, max_dropped=1.0)
    generate(tmp_path, tiny_tokenizer, ["x"], say=say, policy=policy, code=code, seed=1)
    assert [name for name, _ in asked] == ["step1/1/0/t1", "step1/1/0/try2/t1"]
    assert len({seed for _, seed in asked}) == 2


def test_a_failed_episode_ends_the_run_by_default(tmp_path, tiny_tokenizer):
    with pytest.raises(AgentError, match=re.escape("row 2: exception: ")) as info:
        generate(tmp_path, tiny_tokenizer, ["ok", "bad"], num_samples=2)
    assert "agent_func.py:7: ValueError: bad prompt" in str(info.value)
    assert info.value.exit_code == 2
    assert info.value.user_traceback.splitlines()[-1] == "ValueError: bad prompt"


def test_groups_with_failures_are_dropped_and_counted_where_that_is_wished(
    tmp_path, tiny_tokenizer
):
    policy = FailurePolicy(4, drops=True, max_dropped=0.5)
    batch = generate(tmp_path, tiny_tokenizer, ["ok", "bad"], num_samples=2, policy=policy)
    assert [r.row_id for r in batch.rollouts] == [0, 0]
    assert list(batch.failed) == [1]
    assert "ValueError: bad" in batch.failed[1]
    values = batch.metrics.values()
    assert values["agent/num_failed_exception"] >= 1  # the first one ends its group
    assert values["num_dropped_groups"] == 1


def test_an_engine_that_fails_ends_the_run_whatever_code_and_policy(tmp_path, tiny_tokenizer):
    def say(request):
        raise EngineError("the engine is down")

    code = """
        from openrlhf.utils.agent import AgentExecutorBase

        class AgentExecutor(AgentExecutorBase):
            async def execute(self, prompt, label, sampling_params, llm_engine):
                try:
                    await llm_engine.generate(prompt, sampling_params)
                except Exception:
                    return {"reward": 0.0}
    """
    policy = FailurePolicy(4, drops=True, max_dropped=1)

    with pytest.raises(EngineError, match="step1/1/0: the engine is down"):
        generate(tmp_path, tiny_tokenizer, ["ok"], policy=policy, say=say, code=code)


def test_a_rank_that_an_engine_waits_for_is_named_as_lost(tmp_path, tiny_tokenizer):
    why = LostRankError("actor rank 0 of 1 died")
    why.role = "actor"

    def say(request):
        raise why

    with pytest.raises(LostRankError) as caught:  # whoever catches it starts the rank again
        generate(tmp_path, tiny_tokenizer, ["ok"], say=say)
    assert caught.value.role == "actor"


@pytest.mark.parametrize("text", ["one", "two"])  # in one part, and in two
def test_an_episode_whose_engine_was_replaced_under_new_weights_begins_anew(
    tmp_path, tiny_tokenizer, text
):
    class Replaced(StreamingEngine):
        """Has other weights from the second turn on."""

        def complete(self, request) -> Completion:
            whole = super().complete(request)
            self.weight_version = 1
            return whole

    engine = Replaced(says(tiny_tokenizer, "yo"))
    with agents_over([engine], tmp_path, tiny_tokenizer) as source:
        batch = source.generate_samples(
            prompts(tiny_tokenizer, [text]), settings(tiny_tokenizer), tag="step1"
        )
    assert len(engine.requests) == 4  # two turns, twice
    assert {v for r in batch.rollouts for v in r.weight_versions.tolist()} == {1}


def two_part_batch(tmp_path, tokenizer):
    """Group 0: two episodes of reward 0.5; group 1: two episodes of reward 1.5, in two parts."""
    batch = generate(tmp_path, tokenizer, ["a", "two"], num_samples=2)
    return batch.rollouts


def test_parts_of_an_episode_count_once_in_the_metrics(tmp_path, tiny_tokenizer):
    experience = Experience.from_rollouts(two_part_batch(tmp_path, tiny_tokenizer)).laid_out()
    zeros = torch.zeros(len(experience.rollout_logprobs))
    values = experience_metrics(replace(experience, returns=zeros), None).values()
    assert values["reward"] == 1.0  # two episodes of 0.5, two of 1.5; by sequences it were 7 / 6
    assert values["response_length"] == 6
    # "a" has 1 + 3 + 2 + 3 tokens; "two" 3 + 3, and 3 + 2 + 3 in its second part
    assert values["total_length"] == (9 + 14) / 2
    assert values["response_clip_ratio"] == 0
    assert values["group_reward_std"] == 0


def test_parts_of_an_episode_count_once_in_their_group(tmp_path, tiny_tokenizer):
    rollouts = two_part_batch(tmp_path, tiny_tokenizer)
    experience = Experience.from_rollouts(rollouts).laid_out()
    rewards = torch.tensor([0.0, 1.0, 3.0, 3.0, 1.0, 1.0])
    groups = torch.tensor([0, 0, 1, 1, 1, 1])
    advantages, *_ = estimator("rloo").compute(
        rewards,
        groups,
        torch.zeros(len(experience.rollout_logprobs)),
        None,
        experience.num_actions,
        kl_coef=0.0,
        clip_range=(-10, 10),
        episode_ids_B=experience.episode_ids,
    )
    first = advantages.split(experience.num_actions.tolist())
    # group 1 is the episodes 3 and 1: +2 and -2, in both parts of each
    assert [part[0].item() for part in first] == [-1, 1, 2, 2, -2, -2]


def test_parts_of_an_episode_are_trained_on_together(tmp_path, tiny_tokenizer):
    experience = Experience.from_rollouts(two_part_batch(tmp_path, tiny_tokenizer)).laid_out()
    (steps,) = planned_shares(experience, 1, train_batch_size=2, max_epochs=1, seed=0)
    assert len(steps) == 2
    assert sum(step.num_samples for step in steps) == 6
    assert sum(step.num_tokens for step in steps) == len(experience.rollout_logprobs)
    for step in steps:
        ids = experience.episode_ids[step.samples.sample_indices].tolist()
        assert all(ids.count(i) == len(experience.samples_of([i])) for i in ids)


def test_the_overlong_penalty_sees_the_whole_episode(tmp_path, tiny_tokenizer):
    experience = Experience.from_rollouts(two_part_batch(tmp_path, tiny_tokenizer)).laid_out()
    sections = {
        "rollout": {"max_new_tokens": 8},
        "data": {"max_len": 11},
        "reward": {"overlong_buffer_len": 4},
        "train": {"agent_func_path": "agent.py"},
    }
    config = PPOConfig.model_validate(sections)
    penalised = penalised_rewards(config, experience)
    # 9 tokens: 2 of the last 4; and parts of 6 and 8
    assert (experience.rewards - penalised).tolist() == [0.5, 0.5, *[0.25] * 4]


def test_feedback_has_no_advantage_and_no_kl(tmp_path, tiny_tokenizer):
    batch = generate(tmp_path, tiny_tokenizer, ["abc"])
    experience = Experience.from_rollouts(batch.rollouts).laid_out()
    advantages, *_ = estimator("reinforce", no_std_norm=True).compute(
        experience.rewards,
        experience.group_ids,
        torch.arange(6.0),  # one KL a sampled token; the two of the feedback have none
        None,
        experience.num_actions,
        kl_coef=0.1,
        clip_range=(-10, 10),
    )
    sums = torch.tensor([15.0, 15.0, 14.0, 12.0, 9.0, 5.0])  # of this and later sampled tokens
    expected = 1.5 - 0.1 * sums
    assert torch.allclose(advantages, expected - expected.mean(), atol=1e-6)


def test_feedback_is_read_but_has_no_loss(tmp_path, tiny_tokenizer, tiny_model_dir):
    batch = generate(tmp_path, tiny_tokenizer, ["abc"])
    packed = Experience.from_rollouts(batch.rollouts).laid_out().packed()
    model = load_causal_lm(tiny_model_dir)
    actor = Actor(model)
    logprobs = actor(packed, temperature=1.0).logprobs
    plain = transformers.AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    row = plain(packed.token_ids[None]).logits[0].log_softmax(-1)
    # abc yo<end> ?? yo<end>: sampled are 3, 4, 5 and 8, 9, 10, each told by the one before
    expected = [row[t - 1, packed.token_ids[t]].item() for t in (3, 4, 5, 8, 9, 10)]
    assert logprobs.tolist() == pytest.approx(expected, abs=1e-5)
    # The second turn knows the feedback; the first does not.
    other = packed.token_ids.clone()
    other[6] = other[0]
    changed = actor(replace(packed, token_ids=other), temperature=1.0).logprobs
    assert changed[:3].tolist() == logprobs[:3].tolist()
    assert changed[3:].tolist() != logprobs[3:].tolist()


def test_turns_carry_the_versions_of_their_tokens(tmp_path, tiny_tokenizer):
    class Updated(StreamingEngine):
        """Weights change under its second turn."""

        def complete(self, request) -> Completion:
            whole = super().complete(request)
            if len(self.requests) == 1:
                return replace(whole, weight_version=4)
            return replace(whole, weight_version=5, version_starts=((0, 4), (1, 5)))

    engine = Updated(says(tiny_tokenizer, "yo"))
    with agents_over([engine], tmp_path, tiny_tokenizer, may_mix=True) as source:
        stream = DrivenStream(source, settings(tiny_tokenizer))
        stream.submit([((0, 0), prompts(tiny_tokenizer, ["a"])[0])])
        [group] = fetch(stream, 1)
        stream.close()
        assert group.rollouts[0].weight_versions.tolist() == [4, 4, 4, 4, 5, 5]
