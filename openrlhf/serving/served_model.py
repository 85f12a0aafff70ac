"""Reward models as serve_rm asks them: texts to token ids, token ids to scores.

A text is tokenised as it is: special tokens spelled in it are special tokens, since it went through
a chat template where it was made; nothing is put at its end. The score is read at its last token.
Concurrent requests share forwards.
"""

from __future__ import annotations

import asyncio
import hashlib
import heapq
import itertools
import math
from collections.abc import Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import torch
from starlette.exceptions import HTTPException
from torch import Tensor

from openrlhf.config.serving import ServeRewardConfig
from openrlhf.errors import first_line
from openrlhf.models.loading import (
    check_value_model,
    default_device_type,
    load_config,
    load_sequence_model,
)
from openrlhf.models.support import num_positions
from openrlhf.models.value_head import RewardModel, reward_scale
from openrlhf.utils.logging import format_count
from openrlhf.utils.packing import PackedBatch
from openrlhf.utils.tensors import dtype_name, fingerprint
from openrlhf.utils.tokenizer import TextEncoder, load_tokenizer

Row = Sequence[int]  # token ids of one text
Answer = asyncio.Future["float | RefusedError"]
Waiting = tuple[int, int, Row, Answer]  # turn, number of its arrival
SHORTEST = ([0],)  # every vocabulary has a token 0


class RefusedError(HTTPException):
    """A request that is refused: the HTTP status, the reason, and the field it lies in."""

    def __init__(self, status_code: int, detail: str, field: str | None) -> None:
        super().__init__(status_code, detail)
        self.field = field


class ServedModel:
    """One reward model: checked when made, with weights after `load`."""

    module: RewardModel

    def __init__(self, config: ServeRewardConfig, path: str) -> None:
        """Read what is small, config and tokenizer; raise ConfigError."""
        trust = config.trust_remote_code
        self.config = config
        self.path = path
        self.name = Path(path).name  # `org/name` and `/models/name` are both `name`
        self.hash = ""  # of weights and scale, once they are loaded
        facts = load_config(path, trust_remote_code=trust)
        check_value_model(facts, path)
        if config.reward.normalize_enable:
            reward_scale(facts)
        limit = num_positions(facts)
        self.max_len = min(config.data.max_len, limit or config.data.max_len)
        self.tokenizer = load_tokenizer(path, trust_remote_code=trust)
        self._encoder = TextEncoder(self.tokenizer)

    def load(self) -> None:
        """Put the weights on this machine's device."""
        ds = self.config.ds
        hf_model = load_sequence_model(self.path, self.config, allow_fresh_head=False)
        model = RewardModel(hf_model, normalize_reward=self.config.reward.normalize_enable)
        model.requires_grad_(requires_grad=False).eval()
        self.module = model if ds.load_in_4bit else model.to(default_device_type())
        self.hash = model_hash(self.module)

    @property
    def facts(self) -> str:
        """Say in one line what was loaded."""
        some = next(self.module.parameters())
        count = sum(parameter.numel() for parameter in self.module.parameters())
        return (
            f"{self.path}: {format_count(count)} parameters, {dtype_name(some.dtype)} on "
            f"{some.device}, texts up to {self.max_len} tokens, hash {self.hash}"
        )

    def tokenize(self, texts: Sequence[str]) -> list[Row]:
        """Return the token ids of texts; raise RefusedError for a text without tokens, and for one
        that is too long unless it may be cut.
        """
        if not texts:
            return []
        encoded: Any = self.tokenizer(
            list(texts),
            add_special_tokens=False,
            split_special_tokens=False,
            return_attention_mask=False,
            verbose=False,
        )
        rows: list[Row] = [self._encoder.with_leading_ids(ids) for ids in encoded["input_ids"]]
        is_limited = self.config.data.overlong_texts == "error"
        for index, ids in enumerate(rows):
            if not ids:
                raise RefusedError(422, "the text is empty", f"query[{index}]")
            if is_limited and len(ids) > self.max_len:
                raise RefusedError(
                    422,
                    f"{len(ids)} tokens, and --max_len leaves room for {self.max_len}. Send a "
                    "shorter text, or start the server with --overlong_texts truncate_left",
                    f"query[{index}]",
                )
        return rows

    def cut(self, ids: Row) -> Row:
        """Return what fits of a row."""
        keeps_end = self.config.data.overlong_texts == "truncate_left"
        return ids[-self.max_len :] if keeps_end else ids[: self.max_len]

    def score(self, rows: Sequence[Row]) -> list[float]:
        """Return the scores of rows, in one forward pass."""
        ids = [torch.tensor(row, dtype=torch.int64) for row in rows]
        batch = PackedBatch.from_sequences(ids, [torch.zeros(len(row)) for row in rows])
        device = next(self.module.parameters()).device
        try:
            with torch.inference_mode():
                scores: Tensor = self.module(batch.to(device)).scores
                return scores.tolist()
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()  # half of the rows may fit, in memory that is not in pieces
            raise


class Batcher:
    """The queue between requests and one model, on one event loop; forwards run in `thread`.

    Rows that arrive while a forward runs join the next one. The waiting requests give one row each
    in turn, so a large request does not hold up small ones.
    """

    def __init__(
        self, model: ServedModel, thread: Executor, *, max_rows: int | None, max_tokens: int
    ) -> None:
        self.num_forwards = 0
        self.num_rows = 0  # scored so far
        self.is_working = True  # the last forward did not show a broken model
        self._model = model
        self._thread = thread
        self._max_rows = max_rows
        self._max_tokens = max_tokens
        self._waiting: list[Waiting] = []  # a heap: the rows of the next turn come first
        self._turn = 0  # of the row that was taken last
        self._arrivals = itertools.count()
        self._running: asyncio.Task[None] | None = None

    @property
    def num_waiting(self) -> int:
        """Return how many rows no forward has taken yet."""
        return sum(not future.done() for _, _, _, future in self._waiting)

    async def score(self, rows: Sequence[Row]) -> list[float]:
        """Return the score of every row; raise RefusedError for the first that has none.

        Cancelling frees its place.
        """
        futures: list[Answer] = [asyncio.get_running_loop().create_future() for _ in rows]
        for turn, (row, future) in enumerate(zip(rows, futures, strict=True), start=self._turn):
            heapq.heappush(self._waiting, (turn, next(self._arrivals), row, future))
        if self._running is None or self._running.done():
            self._running = asyncio.ensure_future(self._run())
        scores: list[float | RefusedError] = await asyncio.gather(*futures)
        for index, score in enumerate(scores):
            if isinstance(score, RefusedError):
                score.field = f"query[{index}]"
                raise score
        return [score for score in scores if not isinstance(score, RefusedError)]

    async def _run(self) -> None:
        """Score until nothing waits."""
        loop = asyncio.get_running_loop()
        while taken := self._next_rows():
            rows = [row for row, _ in taken]
            scores = await loop.run_in_executor(self._thread, self._scores, rows)
            self.num_rows += len(rows)
            for (_, future), score in zip(taken, scores, strict=True):
                if not future.done():  # or else given up
                    future.set_result(score)

    def _next_rows(self) -> list[tuple[Row, Answer]]:
        """Take rows until the forward is full."""
        taken: list[tuple[Row, Answer]] = []
        num_tokens = 0
        while self._waiting and len(taken) != self._max_rows:
            turn, _, row, future = self._waiting[0]
            num_tokens += 0 if future.done() else len(row)
            if taken and num_tokens > self._max_tokens:
                break
            heapq.heappop(self._waiting)
            self._turn = turn
            if not future.done():  # or else given up
                taken.append((row, future))
        return taken

    def _scores(self, rows: Sequence[Row]) -> list[float | RefusedError]:
        """Return a score or an error for each row: what fails together is tried in halves."""
        self.num_forwards += 1
        try:
            scores = self._model.score(rows)
        except (RuntimeError, MemoryError, IndexError) as error:  # torch's: memory, kernels, ids
            if len(rows) > 1:
                middle = len(rows) // 2
                return self._scores(rows[:middle]) + self._scores(rows[middle:])
            self.is_working = self._still_works()
            return [RefusedError(503, f"the model failed: {first_line(error)[:200]}", None)]
        self.is_working = True
        return [
            score
            if math.isfinite(score)
            else RefusedError(500, f"non_finite: the score is {score}", None)
            for score in scores
        ]

    def _still_works(self) -> bool:
        """Return True if the model scores the shortest text: after some errors a GPU does
        nothing.
        """
        try:
            self._model.score(SHORTEST)
        except RuntimeError:
            return False
        return True


def load_order(config: ServeRewardConfig) -> list[ServedModel]:
    """Return every model of the command line, without weights; raise ConfigError."""
    models = [ServedModel(config, path) for path in config.reward.model_paths]
    names = [model.name for model in models]
    for model in models:
        if names.count(model.name) > 1:
            model.name = model.path
    return models


def model_hash(model: RewardModel) -> str:
    """Return 16 hexadecimal digits of the weights, their types, and the scale of the scores."""
    digest = hashlib.sha256(repr(model.scale).encode())
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {parameter.dtype} {fingerprint(parameter)}".encode())
    return digest.hexdigest()[:16]
