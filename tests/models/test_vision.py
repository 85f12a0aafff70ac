"""Packed rows of pictures and text against each sample alone, as transformers computes it."""

import copy

import pytest
import torch
import transformers

from openrlhf.distributed.export import export_hf
from openrlhf.errors import ConfigError
from openrlhf.models import actor as actor_module
from openrlhf.models import vision
from openrlhf.models.actor import Actor, token_stats
from openrlhf.models.loading import check_own_numbers, load_causal_lm
from openrlhf.utils.packing import PackedBatch
from openrlhf.utils.vision_families import tower_of
from tests.helpers import tiny_vision
from tests.helpers.vision_samples import Samples


@pytest.fixture(scope="module", params=tiny_vision.KINDS)
def folder(request, tmp_path_factory):
    return str(tiny_vision.make(request.param, tmp_path_factory.mktemp(request.param)))


def gradients(model) -> dict[str, torch.Tensor]:
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def test_ids_and_pixels_are_those_of_the_familys_own_processor(folder):
    samples = Samples(folder)
    for i, pictures in enumerate(samples.pictures):
        expected = samples.inputs(i)
        assert samples.ids[i].tolist() == expected["input_ids"][0].tolist()
        if pictures:
            pixels = samples.processor.pixels(pictures).pixels
            assert torch.equal(pixels.flatten(), expected["pixel_values"].flatten())


def test_a_packed_row_computes_what_each_sample_alone_does(folder):
    samples, model = Samples(folder), load_causal_lm(folder)
    plain = transformers.AutoModelForImageTextToText.from_pretrained(
        folder, attn_implementation="eager"
    )
    expected = torch.cat([samples.alone(plain, i) for i in range(5)])
    found = Actor(model)(samples.batch()).logprobs
    assert (found - expected).abs().max() < 1e-6
    expected.sum().backward()
    found.sum().backward()
    wanted, got = gradients(plain), gradients(model)
    assert wanted.keys() == got.keys() and any(
        {*tower_of(plain.config)} & {*n.split(".")} for n in got
    )
    for name, gradient in wanted.items():
        largest = 1e-5 * gradient.abs().max() + 1e-9  # of a key's bias it is none, but for rounding
        assert (got[name] - gradient).abs().max() <= largest, name


def test_an_export_is_the_model_that_was_trained(folder, tmp_path):
    """Of weights of which each was changed, those of the tower too."""
    samples, model = Samples(folder), load_causal_lm(folder)
    before = Actor(model)(samples.batch()).logprobs.detach()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    found = Actor(model)(samples.batch()).logprobs.detach()
    assert (found - before).abs().max() > 0.01
    export_hf(model, samples.tokenizer, tmp_path / "out")
    exported, info = transformers.AutoModelForImageTextToText.from_pretrained(
        tmp_path / "out", output_loading_info=True, attn_implementation="eager"
    )
    assert not any(info.values())
    trained, read = model.state_dict(), exported.state_dict()
    assert trained.keys() == read.keys()
    assert [name for name in trained if not torch.equal(trained[name], read[name])] == []
    expected = torch.cat([samples.alone(exported, i) for i in range(5)])
    assert (found - expected).abs().max() < 1e-5


def test_positions_that_ignore_the_grid_would_be_found(folder, monkeypatch):
    samples, actor = Samples(folder), Actor(load_causal_lm(folder))
    if not samples.processor.family.has_grid_positions:
        return  # a place in the row is all there is
    batch = samples.batch([2])
    right = actor(batch).logprobs
    flat = torch.arange(len(batch.token_ids)).expand(3, -1)
    monkeypatch.setattr(vision, "rotary_positions", lambda *_: flat)
    assert (actor(batch).logprobs - right).abs().max() > 1e-3  # a thousand times what is allowed


def test_a_family_whose_pictures_are_read_otherwise_is_refused(folder, monkeypatch):
    model = load_causal_lm(folder)
    check_own_numbers(model)

    def blind(model, batch):
        batch, sees = vision.vision_inputs(model, batch)
        return batch, sees | {"pixel_values": torch.ones_like(sees["pixel_values"])}

    monkeypatch.setattr(actor_module, "vision_inputs", blind)
    with pytest.raises(ConfigError, match="computes its logits in a way of its own"):
        check_own_numbers(model)


def test_a_row_without_pictures_calls_the_tower_and_computes_the_same(folder):
    """The tower gets a gradient, of zeros: under ZeRO every rank has as many."""
    samples, model = Samples(folder), load_causal_lm(folder)
    plain = transformers.AutoModelForImageTextToText.from_pretrained(folder)
    found = Actor(model)(samples.batch([1, 3])).logprobs
    expected = torch.cat([samples.alone(plain, i) for i in (1, 3)])
    assert (found - expected).abs().max() < 1e-6
    found.sum().backward()
    assert all(not p.grad.any() for p in vision.tower_parameters(model))


@pytest.mark.parametrize("temperature", [1.0, 50.0])
def test_a_placeholder_has_no_probability(folder, temperature):
    samples, actor = Samples(folder), Actor(load_causal_lm(folder))
    ids = samples.ids[1].clone()
    batch = PackedBatch.from_sequences([ids], [torch.arange(len(ids)) == 3])
    states = actor.states_at(batch, batch.predict_index)
    for token in samples.processor.banned_token_ids:
        target = torch.tensor([token])
        logprob, *_ = actor.head(token_stats, states.hidden_nH, target, temperature, False)
        assert logprob.exp().item() == 0
    entropy = actor(batch, temperature, with_entropy=True).entropy
    assert entropy is not None and entropy.isfinite().all()
    assert actor.head.state_dict().keys() == {"weight"}


@pytest.mark.parametrize("kind", ["idefics3", "smolvlm"])
def test_a_patch_of_a_tile_has_its_place_in_16_bits_too(kind, tmp_path):
    model = load_causal_lm(str(tiny_vision.make(kind, tmp_path)))
    found = model.model.vision_model.embeddings
    vision_config = copy.deepcopy(model.config.vision_config)
    vision_config.image_size = 26 * vision_config.patch_size  # as Idefics3-8B has
    plain = type(found)(vision_config)
    torch.nn.init.zeros_(plain.patch_embedding.weight)
    torch.nn.init.zeros_(plain.patch_embedding.bias)
    pixels = torch.zeros(1, 3, vision_config.image_size, vision_config.image_size)
    patches = torch.ones(1, 26, 26, dtype=torch.bool)
    exact = plain(pixels, patch_attention_mask=patches)
    found.num_patches_per_side = plain.num_patches_per_side
    found.patch_embedding = plain.patch_embedding
    found.position_embedding = plain.position_embedding
    assert torch.equal(found(pixel_values=pixels, patch_attention_mask=patches), exact)
    places = [
        embeddings.bfloat16()(pixel_values=pixels.bfloat16(), patch_attention_mask=patches)
        for embeddings in (found, plain)
    ]
    is_exact = [(place == exact.bfloat16()).all(-1).float().mean() for place in places]
    assert is_exact[0] == 1 and is_exact[1] < 0.5  # of transformers'
