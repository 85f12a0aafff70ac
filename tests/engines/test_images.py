"""Engines read images as Hugging Face does, and follow updates of the tower."""

import asyncio
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from openrlhf.engines import own_generate
from openrlhf.engines.base import Completion, GenerationRequest, SamplingSettings
from openrlhf.engines.own_generate import OwnGenerate
from openrlhf.engines.vllm_engine import VLLMEngine, with_images
from openrlhf.errors import WeightSyncError
from openrlhf.models.actor import Actor
from openrlhf.models.loading import load_causal_lm
from openrlhf.models.packing import PACKED_ATTENTION
from openrlhf.models.vision import tower_parameters
from openrlhf.utils.images import ImageProcessor, Picture, read_picture
from openrlhf.utils.packing import PackedBatch
from openrlhf.utils.tensors import fingerprint
from openrlhf.utils.vision_families import FAMILIES
from tests.engines.helpers import buckets, restored, send, weights
from tests.helpers import tiny_vision

SMOL = pytest.param(
    "smolvlm",
    marks=pytest.mark.skipif(not find_spec("num2words"), reason="its processor needs num2words"),
)
PICTURES = tuple(
    read_picture(tiny_vision.noise(*size, seed)) for seed, size in enumerate([(56, 56), (56, 84)])
)


class Seen:
    """A model with what it needs to read images."""

    def __init__(self, path: Path) -> None:
        self.path, self.processor = path, ImageProcessor.load(str(path))
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        self.model: Any = transformers.AutoModelForImageTextToText.from_pretrained(
            path, dtype=torch.float32
        ).eval()

    def request(self, pictures: tuple[Picture, ...], **sampling: Any) -> GenerationRequest:
        content = [{"type": "image"} for _ in pictures] + [{"type": "text", "text": "what"}]
        ids = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, return_dict=False
        )
        expanded = tuple(self.processor.expand(ids, pictures))
        return GenerationRequest("r", expanded, SamplingSettings(**sampling), pictures)

    @torch.no_grad()
    def logprobs(self, request: GenerationRequest, token_ids: tuple[int, ...]) -> torch.Tensor:
        """Log-probs (A, V) before each token that was sampled, in one forward of Hugging Face."""
        ids = torch.tensor([[*request.prompt_token_ids, *token_ids]])
        inputs = self.processor.inputs(request.images, ids)
        logits = self.model(input_ids=ids, **inputs).logits[0, -len(token_ids) - 1 : -1]
        for token_id in self.processor.banned_token_ids:
            logits[:, token_id] -= 100.0
        return logits.log_softmax(-1)

    def gap(self, request: GenerationRequest, answer: Completion) -> float:
        """How far the log-probs of a sample lie from Hugging Face's, at most."""
        targets = torch.tensor(answer.token_ids)[:, None]
        found = self.logprobs(request, answer.token_ids).gather(1, targets).squeeze(1)
        return float((found - torch.tensor(answer.logprobs)).abs().max())

    def is_greedy(self, request: GenerationRequest, answer: Completion) -> bool:
        likeliest = self.logprobs(request, answer.token_ids).argmax(-1)
        return likeliest.tolist() == list(answer.token_ids)


def start(path: Path, processor: ImageProcessor, **settings: Any) -> VLLMEngine:
    return VLLMEngine(
        {
            "model": str(path),
            "dtype": "float32",
            "max_model_len": 512,
            "max_num_seqs": 16,
            "enable_prefix_caching": True,
            **settings,
        },
        processor,
    )


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    return Seen(tiny_vision.make("qwen2_5_vl", tmp_path_factory.mktemp("vision")))


@pytest.fixture(scope="module")
def engine(seen: Seen) -> Iterator[VLLMEngine]:
    engine = start(seen.path, seen.processor)
    yield engine
    engine.shutdown()


def shake(
    model: Any, seed: int, *, std: float = 0.02, among: Iterable[Tensor] | None = None
) -> None:
    """Move all parameters, or those of `among`."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in among or model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * std)


def shake_tower(model: Any, seed: int) -> None:
    shake(model, seed, std=0.1, among=tower_parameters(model))


def three_prompts(seen: Seen, **sampling: Any) -> list[GenerationRequest]:
    return [seen.request(pictures, **sampling) for pictures in (PICTURES, (), PICTURES[:1])]


def check_generation(seen: Seen, engine: VLLMEngine | OwnGenerate) -> None:
    asked = three_prompts(seen, temperature=0.0, max_new_tokens=12)
    for request, [answer] in zip(asked, engine.generate(asked), strict=True):
        assert seen.is_greedy(request, answer)
        assert seen.gap(request, answer) < 1e-6
    asked = three_prompts(seen, num_samples=3, max_new_tokens=12)
    for request, answers in zip(asked, engine.generate(asked), strict=True):
        assert len({answer.token_ids for answer in answers}) == 3
        assert max(seen.gap(request, answer) for answer in answers) < 1e-5


def test_vllm_reads_two_images_one_and_none_in_one_batch_as_hugging_face_does(
    seen, engine, monkeypatch
):
    step, read = engine.llm.step, set[tuple[int, ...]]()

    def noted() -> Any:
        outputs = step()
        read.update(tuple(output.prompt_token_ids) for output in outputs)
        return outputs

    monkeypatch.setattr(engine.llm, "step", noted)
    check_generation(seen, engine)
    assert read == {request.prompt_token_ids for request in three_prompts(seen)}


@pytest.mark.parametrize(
    ("kind", "count"), [("qwen2_5_vl", 400), ("internvl", 404), ("idefics3", 404)]
)
def test_vllm_makes_room_for_the_largest_image_that_a_limit_allows(kind, count, tmp_path):
    """20x20 tokens, of tiles those of the whole picture too; vLLM refuses larger ones."""
    path = str(tiny_vision.make(kind, tmp_path))
    processor = ImageProcessor.load(path, max_pixels=560 * 560)
    assert processor.num_tokens(read_picture(tiny_vision.noise(560, 560))) == count
    arg_utils = pytest.importorskip("vllm.engine.arg_utils")
    from vllm.multimodal import MULTIMODAL_REGISTRY
    from vllm.multimodal.encoder_budget import get_mm_max_toks_per_item

    settings = with_images({"model": path, "max_model_len": 1024}, processor)
    config = arg_utils.EngineArgs(**settings).create_engine_config()
    reader = MULTIMODAL_REGISTRY.create_processor(config.model_config)
    assert get_mm_max_toks_per_item(reader, {"image": 1}, None)["image"] == count


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["qwen2_vl", "qwen3_vl", "qwen2_5_vl, tied", "internvl", "idefics3, tied", SMOL]
)
def test_vllm_reads_images_as_hugging_face_does_in_every_family(kind, tmp_path):
    """And follows an update, whose receipt names the tower; one without a part is refused."""
    kind, is_tied = kind.partition(",")[::2]
    seen = Seen(tiny_vision.make(kind, tmp_path, is_tied=bool(is_tied)))
    engine = start(seen.path, seen.processor)
    check_generation(seen, engine)
    shake(seen.model, 1)
    received = send(engine, weights(seen.model), 1)
    assert received == {name: fingerprint(tensor) for name, tensor in weights(seen.model)}
    check_generation(seen, engine)
    tower = {*FAMILIES[kind].tower}
    name = next(n for n, t in weights(seen.model) if tower & {*n.split(".")} and t.dim() == 2)
    with pytest.raises(WeightSyncError, match=r"incomplete update: 1 missing"):
        send(engine, [weight for weight in weights(seen.model) if weight[0] != name], 2)
    engine.shutdown()


@pytest.mark.parametrize("kind", tiny_vision.KINDS)
def test_a_model_that_generates_itself_reads_images_as_it_does_alone(kind, tmp_path):
    seen = Seen(tiny_vision.make(kind, tmp_path))
    check_generation(seen, OwnGenerate(seen.model, processor=seen.processor))


@pytest.mark.parametrize("kind", tiny_vision.KINDS)
def test_texts_of_several_samples_each_are_generated_as_alone(kind, tmp_path):
    seen = Seen(tiny_vision.make(kind, tmp_path))
    engine = OwnGenerate(seen.model, processor=seen.processor)
    text = seen.request((), num_samples=2, seed=7, max_new_tokens=8)
    asked = [text, replace(text, prompt_token_ids=text.prompt_token_ids[1:])]
    alone = [engine.generate([request])[0] for request in asked]
    for together, apart in zip(engine.generate(asked), alone, strict=True):
        assert [a.token_ids for a in together] == [a.token_ids for a in apart]


def test_an_update_of_the_tower_alone_is_seen_at_once_and_its_receipt_names_it(seen, engine):
    asked = seen.request(PICTURES, temperature=0.0, max_new_tokens=8)
    trained = Seen(seen.path)
    with restored(engine, seen.model, 0):
        [[before]] = engine.generate([asked])
        shake_tower(trained.model, 1)
        received = send(engine, weights(trained.model), 1)
        assert received == {name: fingerprint(tensor) for name, tensor in weights(trained.model)}
        [[after]] = engine.generate([asked])
        assert trained.gap(asked, after) < 1e-6
        assert trained.gap(asked, before) > 0.01


def test_an_update_that_kept_the_vectors_of_images_would_be_found(seen, engine, monkeypatch):
    """vLLM keeps them by the picture, whatever tower made them."""
    asked = seen.request(PICTURES, temperature=0.0, max_new_tokens=8)
    trained = Seen(seen.path)
    shake_tower(trained.model, 1)
    with restored(engine, seen.model, 0):
        engine.generate([asked])
        with monkeypatch.context() as patch:
            patch.setattr(engine.llm, "reset_encoder_cache", lambda: None)
            send(engine, weights(trained.model), 1)
        [[stale]] = engine.generate([asked])
        assert trained.gap(asked, stale) > 0.01


def test_an_engine_that_slept_reads_images_with_the_weights_that_it_is_sent(seen, engine):
    asked = seen.request(PICTURES, temperature=0.0, max_new_tokens=8)
    trained = Seen(seen.path)
    shake_tower(trained.model, 1)
    with restored(engine, seen.model, 0):
        engine.generate([asked])
        engine.sleep()
        engine.wake_up("weights")
        send(engine, weights(trained.model), 1)
        engine.wake_up("kv_cache")
        [[answer]] = engine.generate([asked])
        assert trained.gap(asked, answer) < 1e-6


def test_an_update_in_the_middle_of_a_request_is_seen_by_its_later_tokens(seen, engine):
    asked = seen.request(PICTURES, max_new_tokens=120)
    trained = Seen(seen.path)
    shake_tower(trained.model, 1)
    with restored(engine, seen.model, 0):
        num_steps = engine.num_steps + 10
        [future] = engine.submit([asked])
        end_s = time.monotonic() + 20
        while engine.num_steps < num_steps and time.monotonic() < end_s:
            time.sleep(0.001)
        send(engine, weights(trained.model), 1, keep_running=True)
        [answer] = future.result(60)
        assert set(answer.token_versions) == {0, 1}
        targets = torch.tensor(answer.token_ids)[:, None]
        for version, who in enumerate((seen, trained)):
            found = who.logprobs(asked, answer.token_ids).gather(1, targets).squeeze(1)
            gaps = (found - torch.tensor(answer.logprobs)).abs()
            is_of_version = torch.tensor(answer.token_versions) == version
            assert gaps[is_of_version].max() < 1e-5
            assert gaps[~is_of_version].max() > 0.01


@pytest.mark.parametrize(
    "name",
    [
        "model.language_model.layers.0.self_attn.k_proj.weight",
        "model.visual.blocks.1.attn.proj.weight",
    ],
)
def test_an_update_without_one_matrix_is_refused(seen, name):
    engine = start(seen.path, seen.processor)
    engine.begin_weight_update(False)
    with pytest.raises(WeightSyncError, match=r"incomplete update: 1 missing, e\.g\. .*weight"):
        for bucket in buckets([w for w in weights(seen.model) if w[0] != name], 2**20):
            engine.receive_bucket(bucket)
        engine.finish_weight_update(1)
    engine.shutdown()


@torch.no_grad()
def test_a_placeholder_is_never_sampled(seen, engine):
    """Without the bias they would be: a random model takes each of 266 tokens now and then. The
    trainer computes the same log-probs, at any temperature.
    """
    actor = Actor(load_causal_lm(str(seen.path)))
    banned = set(seen.processor.banned_token_ids)
    assert len(banned) == 2
    settings = {"num_samples": 32, "max_new_tokens": 100}
    own = OwnGenerate(seen.model, processor=seen.processor)
    for sampler, temperatures in ((engine, (1.0, 2.0)), (own, (1.0, 50.0))):  # vLLM takes no more
        asked = [seen.request(PICTURES[:1], temperature=t, **settings) for t in temperatures]
        for request, answers in zip(asked, sampler.generate(asked), strict=True):
            assert not banned & {token for answer in answers for token in answer.token_ids}
            ids = torch.tensor([*request.prompt_token_ids, *answers[0].token_ids])
            is_target = torch.arange(len(ids)) >= len(request.prompt_token_ids)
            row = PackedBatch.from_sequences([ids], [is_target])
            row = row.with_pictures([request.images], seen.processor)
            logprobs = actor(row, request.sampling.temperature).logprobs
            assert (logprobs - torch.tensor(answers[0].logprobs)).abs().max() < 1e-5


def test_a_request_of_an_event_loop_carries_its_images(seen, engine):
    asked = seen.request(PICTURES, temperature=0.0, max_new_tokens=4)
    [answer] = asyncio.run(engine.sample(asked))
    assert seen.is_greedy(asked, answer)


def test_attention_of_tower_and_language_model_comes_back_behind_a_call(seen, monkeypatch):
    """On a GPU rows are packed by an attention that takes no masks, and the tower has another."""
    monkeypatch.setattr(own_generate, "KEPT_ATTENTION", ("eager",))
    model = load_causal_lm(str(seen.path))
    before = own_generate.attention_of(model.config)
    assert before == {
        "": PACKED_ATTENTION,
        "text_config": PACKED_ATTENTION,
        "vision_config": "sdpa",
    }
    inside = []
    with own_generate.generating(model):
        inside.append(own_generate.attention_of(model.config))
        request = seen.request(PICTURES[:1], temperature=0.0, max_new_tokens=4)
    assert set(inside[0].values()) == {"sdpa"}
    assert own_generate.attention_of(model.config) == before
    [[answer]] = OwnGenerate(model, processor=seen.processor).generate([request])
    assert seen.gap(request, answer) < 1e-6
    assert own_generate.attention_of(model.config) == before
