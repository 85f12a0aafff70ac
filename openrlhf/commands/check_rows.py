"""Two rows of a data set as the model reads them, what is learnt in colour, and the rewards of two
rows for responses that are known: the row's own label and that of another row.
"""

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby

import rich.text
import torch
from torch import Tensor

from openrlhf.config.generation import GenerationRunConfig
from openrlhf.datasets.tokenized import TokenizedDataset
from openrlhf.engines.base import Completion, GenerationRequest
from openrlhf.errors import ConfigError, Gathered, RewardError, first_line
from openrlhf.models.loading import default_device_type, load_sequence_model
from openrlhf.models.value_head import RewardModel
from openrlhf.rollout.agents.episodes import AgentEpisodes, agent_setup
from openrlhf.rollout.engine_pool import EnginePool
from openrlhf.rollout.rollout import RolloutRequest
from openrlhf.rollout.scoring import FailurePolicy, Scorer, SourceScorer
from openrlhf.trainer.ppo_inputs import RunInputs
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ppo_utils.model_scorer import ModelScorer
from openrlhf.trainer.ppo_utils.worker_group import Forward
from openrlhf.utils.console import is_terminal, make_console, notice, warn
from openrlhf.utils.rollout import Rollout
from openrlhf.utils.samples import shortened
from openrlhf.utils.tokenizer import Tokenizer

NUM_ROWS = 2
NUM_COMPARED = 100  # rows among which a label of another kind is looked for
EPISODE_S = 30.0  # for an episode of an agent
WITHOUT_LABEL = ("yes", "no")  # responses to rows without a label
LEARNT = "bold green"
MARKS = ("«", "»")  # around what is learnt, where there are no colours


def say_rows(samples: TokenizedDataset, tokenizer: Tokenizer) -> None:
    """Print the first rows with what is learnt of them."""
    console, is_coloured = make_console(), is_terminal()
    for index in range(min(NUM_ROWS, len(samples))):
        sequences = samples.sequences(index)
        for number, (ids, targets) in enumerate(sequences, start=1):
            part = f", sequence {number} of {len(sequences)}" if len(sequences) > 1 else ""
            learnt = f", {int(targets.sum())} learnt" if targets.any() else ""
            notice(f"\n{samples.location(index)}{part}: {len(ids)} tokens{learnt}")
            for line in samples.picture_notes(index):
                notice(line)
            is_run = samples.is_placeholder(ids) & samples.is_placeholder(ids.roll(1))
            ids, targets = ids[~is_run].tolist(), targets[~is_run].tolist()  # one for each picture
            console.print(shown(ids, targets, tokenizer, is_coloured=is_coloured))


def shown(
    ids: Sequence[int], targets: Sequence[bool], tokenizer: Tokenizer, *, is_coloured: bool
) -> rich.text.Text:
    """Return the text of tokens, its targets in colour, or else between MARKS."""
    text, marks = rich.text.Text(), ("", "") if is_coloured else MARKS
    for is_target, pairs in groupby(zip(ids, targets, strict=True), key=lambda pair: pair[1]):
        ids = [token for token, _ in pairs]
        part = shortened(tokenizer.decode(ids, skip_special_tokens=False))
        text.append(marks[0] + part + marks[1] if is_target else part, LEARNT if is_target else "")
    return text


def try_rewards(
    config: GenerationRunConfig, inputs: RunInputs, gathered: Gathered, *, has_room: bool
) -> None:
    """Print the rewards of the first rows, for the row's label and for another row's as response;
    note what is wrong with the source. `has_room`: for the reward models of the run.
    """
    if config.train.agent_func_path:
        asyncio.run(_try_agent(config, inputs, gathered))
        return
    if inputs.reward_source is None and not config.reward.model_paths:
        return  # that none is named is said by the flags
    if inputs.reward_source is None and not has_room:
        notice("\nthe reward models were not tried: they have no room here, or an unknown size")
        return
    near = [inputs.prompts[index] for index in range(min(NUM_COMPARED, len(inputs.prompts)))]
    labels = [_words(prompt.label) for prompt in near]
    others = [next((word for word in labels if word != own), "") for own in labels[:NUM_ROWS]]
    scorer: Scorer | None
    if inputs.reward_source is None:
        try:
            scorer = None
            with gathered:
                scorer = _loaded(config)
        except (MemoryError, OSError, RuntimeError) as error:
            notice(f"\nthe reward models were not tried: {first_line(error)}")
            return
        if scorer is None:
            return
    else:
        size, sees = config.rollout.micro_batch_size, inputs.image_processor is not None
        scorer = SourceScorer(inputs.reward_source, size, max_steps=1, reads_images=sees)
    same, has_failed = list[str](), False
    for index, other in enumerate(others):
        words = (labels[index], other) if labels[index] else WITHOUT_LABEL
        try:
            group, outcome = asyncio.run(_scored(scorer, inputs, index, [w for w in words if w]))
        except ConfigError as error:  # its functions cannot be called
            gathered.note(error)
            return
        if isinstance(outcome, RewardError):
            gathered.note(outcome, about=f"{inputs.prompts.location(index)}: ")
            has_failed = True
            continue
        notice(f"\nreward of {inputs.prompts.location(index)}, label {near[index].label!r}")
        rewards = {sample.sample_id: sample.reward for sample in outcome}
        for response in group:
            reward = rewards.get(response.sample_id)
            number = "none" if reward is None else f"{reward:g}"
            notice(f"  response {shortened(response.plain_response)!r}: {number}")
        if labels[index] and other and len(set(rewards.values())) == 1:
            same.append(inputs.prompts.location(index))
    if same and inputs.reward_source is not None and not has_failed:
        told = f"a row's own label earns no more than another row's: {'; '.join(same)}. Look "
        told += "at what the function compares, the form that it reads, such as \\boxed{}, and at "
        warn(f"{told}--label_key")


def _loaded(config: GenerationRunConfig) -> ModelScorer:
    """Return the reward models of a run, on the device of this process."""
    device = default_device_type()
    models: dict[str, Forward] = {}
    for name, path in zip(config.reward.model_names, config.reward.model_paths, strict=True):
        hf_model = load_sequence_model(path, config, allow_fresh_head=False)
        model = RewardModel(hf_model, normalize_reward=config.reward.normalize_enable).eval()
        model = model if config.ds.load_in_4bit else model.to(device)

        def forward(experience: Experience, model: RewardModel = model) -> Callable[[], Tensor]:
            with torch.inference_mode():
                scores: Tensor = model(experience.laid_out().packed().to(device)).scores
            return scores.cpu

        models[name] = forward
    return ModelScorer(models, config.reward.weights, in_turn=True)


async def _try_agent(config: GenerationRunConfig, inputs: RunInputs, gathered: Gathered) -> None:
    """Print the rewards of an episode of the first rows, in which every response is the row's
    label; note what is wrong with the agent.
    """
    engine, sampling = _Given([]), replace(inputs.sampling, num_samples=1)
    setup = agent_setup(
        config,
        inputs.tokenizer,
        vocab_size=inputs.vocab_size,
        image_processor=inputs.image_processor,
    )
    limit_s = min(setup.episode_timeout_s, EPISODE_S)
    setup = replace(setup, episode_timeout_s=limit_s)
    agents = AgentEpisodes(setup, [engine], FailurePolicy(step_size=1))
    try:
        for index in range(min(NUM_ROWS, len(inputs.prompts))):
            prompt = inputs.prompts[index]
            engine.completions = _completions(inputs, [_words(prompt.label) or WITHOUT_LABEL[0]])
            parts = await agents.samples_of(
                RolloutRequest(prompt, sampling, f"row{index + 1}", index)
            )
            row = inputs.prompts.location(index)
            notice(f"\nreward of an episode of {row}, label {prompt.label!r}")
            for part in parts:
                notice(f"  response {shortened(part.response_text)!r}: {part.reward:g}")
    except (ConfigError, RewardError) as error:
        gathered.note(error)
    finally:
        await agents.close()


class _Given:
    """An engine whose responses are given."""

    is_up, waits_for = True, None

    def __init__(self, completions: list[Completion]) -> None:
        self.completions = completions

    async def sample(self, request: GenerationRequest) -> list[Completion]:
        return self.completions


async def _scored(
    scorer: Scorer, inputs: RunInputs, index: int, words: Sequence[str]
) -> tuple[list[Rollout], list[Rollout] | RewardError]:
    """Return samples of a prompt with these responses, and the same with their rewards."""
    completions = _completions(inputs, words)
    engine = EnginePool([_Given(completions)], inputs.tokenizer, vocab_size=inputs.vocab_size)
    sampling = replace(inputs.sampling, num_samples=len(completions))
    group = await engine.samples_of(
        RolloutRequest(inputs.prompts[index], sampling, f"row{index + 1}", 0)
    )
    [outcome] = await scorer.score([group])
    return group, outcome


def _completions(inputs: RunInputs, words: Sequence[str]) -> list[Completion]:
    """Return responses of these words."""
    ends = inputs.sampling.stop_token_ids[:1]
    ids = [(*inputs.tokenizer.encode(word, add_special_tokens=False), *ends) for word in words]
    return [Completion(each, (0.0,) * len(each), "stop", 0) for each in ids]


def _words(label: object) -> str:
    return label if isinstance(label, str) else json.dumps(label, default=str, ensure_ascii=False)
