import pytest
import torch
import transformers

from openrlhf.errors import ConfigError
from openrlhf.models.loading import load_sequence_model
from openrlhf.models.value_head import CriticModel, RewardModel, reward_mean_and_std
from openrlhf.utils.packing import PackedBatch
from tests.models.helpers import (
    full_batch,
    random_lengths,
    random_masks,
    random_sequences,
    tiny_model,
)
from tests.tiny import as_openrlhf_saves, make_reward_model


def fp32(path, cls=RewardModel, *, normalize_reward=False, **options):
    model = load_sequence_model(path, **options)
    return cls(model, normalize_reward=normalize_reward)


def said(model, batch):
    """What a critic or a reward model says."""
    found = model(batch)
    return found if isinstance(found, torch.Tensor) else found.scores


@pytest.fixture(scope="module")
def causal_dir(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("value"), "qwen2")


@pytest.mark.parametrize("architecture", ["qwen2", "gpt_neox", "bloom", "qwen3_next"])
def test_rewards_equal_the_hugging_face_classifier(architecture, tmp_path):
    model = fp32(tiny_model(tmp_path, architecture))
    model.model.save_pretrained(tmp_path / "saved")
    classifier, info = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "saved", num_labels=1, dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    sequences = random_sequences(random_lengths(10, 30))
    with torch.no_grad():
        expected = torch.cat([classifier(input_ids=ids[None]).logits[0] for ids in sequences])
    assert expected.std() > 0.01
    torch.testing.assert_close(said(model, full_batch(sequences)), expected, atol=1e-5, rtol=1e-5)


def test_close_scores_in_half_precision_are_not_equal(causal_dir):
    model = fp32(causal_dir).bfloat16()
    model.model.score.weight.data *= 40  # large scores: the grid of bfloat16 is wide
    sequences = random_sequences([12] * 256)
    with torch.no_grad():
        scores = said(model, full_batch(sequences))
    assert scores.dtype == torch.float32 and len(scores) >= 256
    assert len(scores.unique()) > 0.99 * len(scores)
    assert len(scores.bfloat16().unique()) < 0.9 * len(scores)


def test_values_are_read_before_each_target_one_sequence_at_a_time(causal_dir):
    critic = fp32(causal_dir, CriticModel)
    sequences = random_sequences(random_lengths(15, 30))
    masks = random_masks(sequences)
    expected = []
    for ids, mask in zip(sequences, masks, strict=True):
        hidden = critic.model.base_model(input_ids=ids[None]).last_hidden_state[0]
        expected.append((hidden @ critic.model.score.weight[0])[:-1][mask[1:]])
    values = critic(PackedBatch.from_sequences(sequences, masks))
    torch.testing.assert_close(values, torch.cat(expected), atol=1e-5, rtol=1e-5)


def test_scoring_with_a_model_that_never_had_a_head_is_an_error(causal_dir):
    with pytest.raises(ConfigError, match="no value head"):
        fp32(causal_dir, allow_fresh_head=False)


@pytest.mark.parametrize("architecture", ["qwen2", "mistral"])
@pytest.mark.parametrize(
    ("cls", "head"),
    [(RewardModel, "score"), (RewardModel, "value_head"), (CriticModel, "value_head")],
)
def test_models_that_openrlhf_saved_have_the_outputs_they_were_trained_for(
    architecture, cls, head, tmp_path
):
    made = make_reward_model(tmp_path / "made", architecture=architecture)
    path = as_openrlhf_saves(made, tmp_path / "saved", head=head, kind=cls.__name__)
    batch = full_batch(random_sequences([4, 9, 20]))
    model = fp32(path, cls, allow_fresh_head=False, normalize_reward=True)
    assert torch.equal(said(model, batch), said(fp32(made, cls, normalize_reward=True), batch))
    assert model.scale == (0.1, 0.5)
    model.model.save_pretrained(tmp_path / "again")  # from here on it is a classifier
    again = fp32(tmp_path / "again", cls, normalize_reward=True)
    assert torch.equal(said(again, batch), said(model, batch))


def test_the_stored_head_name_wins_and_survives(causal_dir, tmp_path):
    from safetensors.torch import load_file

    batch = full_batch(random_sequences([4, 9]))
    path = tmp_path / "first"
    model = fp32(causal_dir, value_head_prefix="value_head")
    scores = said(model, batch)
    model.model.save_pretrained(path)
    for generation in ("second", "third"):
        assert "value_head.weight" in load_file(path / "model.safetensors")
        model = fp32(path, value_head_prefix="score")
        assert torch.equal(said(model, batch), scores)
        path = tmp_path / generation
        model.model.save_pretrained(path)


@pytest.mark.parametrize("fields", [{}, {"mean": 0.0}, {"mean": 0.0, "std": 0.0}])
def test_normalising_without_usable_statistics_is_an_error(fields):
    with pytest.raises(ConfigError, match="normalize_reward"):
        reward_mean_and_std(transformers.PretrainedConfig(**fields))
