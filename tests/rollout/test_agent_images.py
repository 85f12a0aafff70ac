"""Agents and environments with images: what the engine samples is what the trainer computes."""

import pytest
import transformers

from openrlhf.engines.base import SamplingSettings
from openrlhf.engines.own_generate import OwnGenerate
from openrlhf.rollout.agents.episode import Segment
from openrlhf.rollout.agents.episodes import checked
from openrlhf.rollout.engine_pool import BatchedEngine
from openrlhf.utils.agent import AgentError
from openrlhf.utils.images import ImageProcessor, Picture, read_picture
from openrlhf.utils.rollout import PromptRecord
from openrlhf.utils.worker_process import from_json, to_json
from tests.helpers import tiny_vision
from tests.helpers.rollouts import largest_gap
from tests.rollout.agent_fakes import EpisodeResult, agents_over, setup_of

PLACE = "<|vision_start|><|image_pad|><|vision_end|>"
SMALL, WIDE = (read_picture(tiny_vision.noise(28, 28 * size, size)) for size in (1, 2))
ENVIRONMENT = f"""
    from PIL import Image
    from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

    class AgentInstance(AgentInstanceBase):
        num_steps = 0

        async def reset(self, states):
            assert [image.size for image in states["images"]] == [(56, 28)]
            return {{"observation": states["observation"]}}

        async def step(self, states):
            self.num_steps += 1
            colour = (0, 0, 80 * self.num_steps)
            return {{
                "rewards": 1.0,
                "environment_feedback": "<|end|><|user|>{PLACE}and now?<|end|><|assistant|>",
                "environment_images": [Image.new("RGB", (28, 56), colour)],
                "done": self.num_steps == 3,
            }}

    class AgentExecutor(MultiTurnAgentExecutor):
        def __init__(self):
            super().__init__(AgentInstance)

        async def execute(self, prompt, label, sampling_params, **more):
            sampling_params.max_tokens = 6
            return await super().execute(prompt, label, sampling_params, **more)
"""
# The executor asks with images of its own: in another order, twice, and as a new prompt.
OWN_PROMPTS = f"""
    from openrlhf.utils.agent import AgentExecutorBase

    class AgentExecutor(AgentExecutorBase):
        async def execute(self, prompt, label, sampling_params, llm_engine, images):
            sampling_params.max_tokens = 4
            text = "<|user|>{PLACE}{PLACE}?<|end|><|assistant|>"
            both = {{"image": [images[0].resize((28, 28)), images[0]]}}
            asked = {{"prompt": text, "multi_modal_data": both}}
            first = await llm_engine.generate(asked, sampling_params)
            ids = [*first.prompt_token_ids, *first.outputs[0].token_ids]
            again = {{"prompt_token_ids": ids, "multi_modal_data": both}}
            await llm_engine.generate(again, sampling_params)
            return {{"reward": 1.0}}
"""
# The first question is asked without the image of the prompt.
BLIND_START = ENVIRONMENT.replace('states["observation"]', '"<|user|>?<|end|><|assistant|>"')
# Two turns at the same time, each with an image of its own behind the prompt.
BRANCHES = f"""
    from PIL import Image
    from openrlhf.utils.agent import AgentError, AgentExecutorBase

    class AgentExecutor(AgentExecutorBase):
        async def execute(self, prompt, label, sampling_params, llm_engine):
            sampling_params.max_tokens = 4
            start = llm_engine.encode_prompt(prompt)
            branches = [
                start + llm_engine.encode_feedback("{PLACE}?", [Image.new("RGB", (28, 28), colour)])
                for colour in ("red", "blue")
            ]
            said = []
            for ids in branches:
                try:
                    await llm_engine.generate(ids, sampling_params)
                except AgentError as error:
                    said.append("does not show all images of the episode" in str(error))
            await llm_engine.generate("?", sampling_params)  # shows none
            return {{"reward": float(sum(said))}}
"""
CLIENT = """
    from openai import AsyncOpenAI, BadRequestError
    from openrlhf.utils.agent import OpenAIAgentExecutor

    def picture(url):
        return {"type": "image_url", "image_url": {"url": url}}

    class AgentExecutor(OpenAIAgentExecutor):
        async def run(self, session, prompt, label):
            client = AsyncOpenAI(base_url=session.base_url, api_key=session.api_key)
            asked = [{"type": "text", "text": "what?"}, picture(session.images[0])]
            messages = [{"role": "user", "content": asked}]
            for _ in range(2):
                answer = await client.chat.completions.create(
                    model=session.model, messages=messages, max_tokens=8
                )
                messages.append(answer.choices[0].message.model_dump())
                messages.append({"role": "user", "content": [picture(session.images[0])]})
            messages[-1]["content"][0]["image_url"]["url"] = "http://example.com/a.png"
            try:
                await client.chat.completions.create(model=session.model, messages=messages)
            except BadRequestError as error:
                return {"reward": float("not a data URL" in str(error))}
"""


@pytest.fixture(
    scope="module", params=["qwen2_5_vl", pytest.param("idefics3", marks=pytest.mark.slow)]
)
def model(request, tmp_path_factory):
    return str(tiny_vision.make(request.param, tmp_path_factory.mktemp("vision")))


@pytest.fixture(scope="module")
def processor(model):
    return ImageProcessor.load(model)


def act(model, processor, folder, code, images=(WIDE,)):
    """Two episodes of a prompt with images; they are checked against the trainer."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    place = PLACE if processor.family.has_grid_positions else "<image>"
    text = f"<|user|>{place * len(images)}?<|end|><|assistant|>"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    prompt = PromptRecord(0, text, tuple(processor.expand(ids, images)), images=images)
    hf_model = transformers.AutoModelForImageTextToText.from_pretrained(model).eval()
    engine = OwnGenerate(hf_model, processor=processor)
    sampling = SamplingSettings(num_samples=2, stop_token_ids=(tokenizer.eos_token_id,), seed=0)
    with agents_over(
        [BatchedEngine(engine.generate)],
        folder,
        tokenizer,
        code=code.replace(PLACE, place),
        image_processor=processor,
    ) as agents:
        rollouts = agents.generate_samples([prompt], sampling, tag="step1").rollouts
    assert largest_gap(model, rollouts, 1.0, processor) < 1e-5
    for rollout in rollouts:
        places = processor.placeholders(rollout.token_ids.tolist(), rollout.images)
        assert sum(map(len, places)) == rollout.num_image_tokens  # each has its own
    return rollouts


def test_an_environment_answers_with_images_and_resets_with_those_of_the_prompt(
    model, processor, tmp_path
):
    rollouts = act(model, processor, tmp_path, ENVIRONMENT)
    assert [r.reward for r in rollouts] == [3.0, 3.0]
    for rollout in rollouts:
        prompt_image, *others = rollout.images
        assert prompt_image is WIDE  # its bytes are not held twice
        assert [image.open().getpixel((0, 0)) for image in others] == [(0, 0, 80), (0, 0, 160)]


def test_an_image_that_the_first_question_leaves_out_is_none_of_the_episode(
    model, processor, tmp_path
):
    """Else an image of the environment would be sampled and trained as that of the prompt."""
    code = BLIND_START.replace("(28, 56)", "(56, 28)")  # as many tokens as the prompt's has
    for rollout in act(model, processor, tmp_path, code):
        colours = [image.open().getpixel((0, 0)) for image in rollout.images]
        assert colours == [(0, 0, 80), (0, 0, 160)]


@pytest.mark.parametrize("start", ["start", "llm_engine.encode_prompt(prompt)"])
def test_tokens_that_leave_open_which_images_they_show_are_refused(
    model, processor, tmp_path, start
):
    rollouts = act(model, processor, tmp_path, BRANCHES.replace("start +", f"{start} +"))
    assert [rollout.reward for rollout in rollouts] == [2.0, 2.0]


def test_an_environment_gets_an_empty_list_where_a_prompt_has_no_images(model, processor, tmp_path):
    code = ENVIRONMENT.replace("== [(56, 28)]", "== []")
    rollouts = act(model, processor, tmp_path, code, images=())
    assert {len(rollout.images) for rollout in rollouts} == {2}


def test_an_executor_gets_images_and_asks_with_its_own(model, processor, tmp_path):
    rollouts = act(model, processor, tmp_path, OWN_PROMPTS)
    for rollout in rollouts:
        assert [(image.width, image.height) for image in rollout.images] == [(28, 28), (56, 28)]
    assert len({rollout.sample_id for rollout in rollouts}) == 2  # one segment each


def test_a_client_of_the_openai_api_sends_images_as_data_urls(model, processor, tmp_path):
    pytest.importorskip("openai")
    rollouts = act(model, processor, tmp_path, CLIENT)
    assert {rollout.reward for rollout in rollouts} == {1.0}
    assert {len(rollout.images) for rollout in rollouts} <= {1, 2}
    assert max(len(rollout.images) for rollout in rollouts) == 2


def test_images_of_a_process_are_what_they_say_and_have_their_places(model, processor, tmp_path):
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    setup = setup_of(tmp_path, tokenizer, image_processor=processor)
    pad = processor.image_token_id
    run = processor.expand([pad], [WIDE])
    forged = Picture(WIDE.data, WIDE.sha256, 28, 28)
    no_file = Picture(b"nothing", "0", 28, 28)

    def sent(ids: list[int], *images: Picture) -> object:
        mask = [False] * (len(ids) - 1) + [True]
        segment = Segment(ids, mask, len(ids) - 1, [-1.0], [0], images=images)
        return from_json(to_json(("answer", 0, EpisodeResult((segment,), reward=1.0))))[2]

    assert checked(sent([*run, 5], WIDE), setup).segments[0].images == (WIDE,)
    for ids, *images in ([pad, 5],), ([pad, 5], WIDE), ([pad, 5], forged), ([pad, 5], no_file):
        with pytest.raises(AgentError, match="sent an episode that cannot be"):
            checked(sent(ids, *images), setup)
