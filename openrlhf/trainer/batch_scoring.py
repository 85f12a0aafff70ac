"""Scoring answers in bulk: the task rm of batch_inference.

A row's prompt and answer become the tokens that train_rm would have seen, and the reward model
reads its score at the last one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from openrlhf.config.serving import BatchInferenceConfig
from openrlhf.datasets.chat import to_messages
from openrlhf.datasets.sft_dataset import SFTDataset, SFTFormat
from openrlhf.distributed.strategy import DeepSpeedStrategy
from openrlhf.distributed.train_engine import EvalEngine
from openrlhf.errors import RewardError
from openrlhf.models.value_head import RewardModel
from openrlhf.trainer.answer_parts import Rows
from openrlhf.trainer.batch_task import BatchTask, Record, asked_columns, load_options
from openrlhf.utils.packing import PackedBatch
from openrlhf.utils.progress import progress

BATCHES_BETWEEN_WRITES = 16


class ScoreTask(BatchTask):
    """Prompts with answers, scored by a reward model."""

    def __init__(self, config: BatchInferenceConfig) -> None:
        super().__init__(config)
        self.notices = self.examples.notices

    def _tokenise(self) -> None:
        form = SFTFormat.of(self.config.data)
        self.examples = SFTDataset(self.rows, self.tokenizer, form)

    @property
    def items(self) -> range:
        """Every row that can be scored."""
        return range(len(self.examples))

    def row_id(self, item: int) -> int:
        """The row of a pair of prompt and answer."""
        return self.examples.row_ids[item]

    @property
    def data_key(self) -> str:
        """A hash of all tokens."""
        return self.examples.fingerprint

    def work(self, mine: Sequence[int], record: Record, strategy: DeepSpeedStrategy) -> None:
        """Score rows, those of like length together.

        Under ZeRO-3 every forward takes all ranks: a rank that is done scores its row 0 again and
        forgets it.
        """
        engine = self._engine(strategy)
        lengths = self.examples.lengths
        ordered = sorted(mine, key=lambda index: -int(lengths[index]))
        size = self.config.micro_batch_size
        batches = [ordered[start : start + size] for start in range(0, len(ordered), size)]
        num_forwards = len(batches)
        if self.config.ds.zero_stage == 3:
            num_forwards = int(strategy.all_reduce_max({"n": float(num_forwards)})["n"])
        unwritten: dict[int, Rows] = {}
        with progress("scoring rows", len(ordered)) as advance:
            for number in range(num_forwards):
                if number >= len(batches):
                    self._score(engine, [0])
                    continue
                unwritten.update(self._score(engine, batches[number]))
                advance(len(batches[number]))
                if (number + 1) % BATCHES_BETWEEN_WRITES == 0 or number + 1 == len(batches):
                    record(unwritten)
                    unwritten = {}

    def _engine(self, strategy: DeepSpeedStrategy) -> EvalEngine:
        model = RewardModel.from_pretrained(
            self.model_path,
            value_head_prefix=self.config.ds.value_head_prefix,
            allow_fresh_head=False,
            **load_options(self.config),
        )
        return strategy.prepare_eval(model)

    def _score(self, engine: EvalEngine, indices: Sequence[int]) -> dict[int, Rows]:
        examples = [self.examples[index] for index in indices]
        batch = PackedBatch.from_sequences(
            [example.token_ids for example in examples], [example.loss_mask for example in examples]
        )
        scores = engine(batch.to(engine.device))
        assert isinstance(scores, Tensor), "RewardModel.forward"
        pairs = zip(indices, scores.tolist(), strict=True)
        return {index: [self._row(index, score)] for index, score in pairs}

    def _row(self, index: int, reward: float) -> dict[str, object]:
        row_id = self.row_id(index)
        if not math.isfinite(reward):
            raise RewardError(f"the reward model scored row {row_id + 1} with {reward}")
        row, column = self.rows[row_id], self.examples.output_column
        if column is None:  # the dialogue ends with the answer
            *asked, answer = to_messages(row[self.examples.input_column])
            return {"input": asked, "output": answer["content"], "reward": reward}
        asked = asked_columns(self.examples.asked(row))
        return {**asked, "output": row[column], "reward": reward}
