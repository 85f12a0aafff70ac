"""From the body of a request to its rewards: parse, tokenise, score, add up.

Everything that takes time leaves the event loop: large bodies and texts go through one thread of
their own, piece by piece, so that requests take turns there; scores come from the batcher.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from openrlhf.config.reward_server import ServeRewardConfig
from openrlhf.trainer.reward_server.answers import Answer
from openrlhf.trainer.reward_server.batcher import Batcher, Row
from openrlhf.trainer.reward_server.model import ServedModel, Tokenized
from openrlhf.trainer.reward_server.request import RefusedError, RewardRequest, read_request

SMALL_BODY = 65_536  # bytes that are parsed in the event loop
CHARS_AT_ONCE = 65_536  # tokenised in one go
SHORTEST = ([0],)  # every vocabulary has a token 0


class RewardService:
    """The models of a server and what waits for them."""

    def __init__(self, config: ServeRewardConfig, models: Sequence[ServedModel]) -> None:
        limits = config.limits
        self.models = models
        self.batcher = Batcher(max_rows=config.batch_size, max_tokens=limits.max_tokens_per_forward)
        self.is_loaded = False
        self.is_answering = True  # the last forward did not show a broken model
        self._limits = limits
        self._weights = config.reward.model_weights
        self._is_cutting = config.data.overlong_texts != "error"
        self._helper = ThreadPoolExecutor(1, thread_name_prefix="reward-texts")

    def load(self) -> None:
        """Load the weights of every model, and show that it answers."""
        for model in self.models:
            model.load()
            model.score(SHORTEST)
        self.is_loaded = True

    def run(self) -> None:
        """Score in this thread until the batcher is closed."""
        self.batcher.run(self._score)

    def close(self) -> None:
        """Fail what still waits and let `run` return."""
        self.batcher.close()
        self._helper.shutdown(wait=False, cancel_futures=True)

    def state(self) -> dict[str, object]:
        """Whether requests are answered, and how many texts wait."""
        is_ready = self.is_loaded and self.is_answering
        reason = None if is_ready else "the model fails" if self.is_loaded else "loading"
        return {"ready": is_ready, "reason": reason, "queued": self.batcher.num_waiting}

    def check_loaded(self) -> None:
        """Raise RefusedError until there are weights."""
        if not self.is_loaded:
            raise RefusedError(503, "the model is being loaded", None)

    async def answer(self, body: bytes) -> Answer:
        """The rewards of a request; raises RefusedError and ScoringError."""
        request = await self._read(body)
        chosen = self._chosen(request.model)
        tokenized = [await self._tokenize(self.models[k], request.queries) for k in chosen]
        scores = await asyncio.gather(
            *(self.batcher.score(k, texts.rows) for k, texts in zip(chosen, tokenized, strict=True))
        )
        answer = self._added(chosen, scores)
        if self._is_cutting:
            cut = [any(column) for column in zip(*(t.truncated for t in tokenized), strict=True)]
            answer["truncated"] = cut
            answer.setdefault("extra_logs", {})["truncated"] = [float(is_cut) for is_cut in cut]
        if request.ids is not None:
            answer["ids"] = list(request.ids)
        return answer

    def _score(self, index: int, rows: Sequence[Row]) -> list[float]:
        """Scores of one forward; a text that fails shows whether all others would fail too."""
        model = self.models[index]
        try:
            scores = model.score(rows)
        except RuntimeError:
            if len(rows) == 1:
                self.is_answering = still_answers(model)
            raise
        self.is_answering = True
        return scores

    def _added(self, chosen: Sequence[int], scores: Sequence[Sequence[float]]) -> Answer:
        """The weighted sum of the models that were asked; of several also the parts."""
        is_all = len(chosen) == len(self.models)
        weights = [self._weights[k] if is_all else 1.0 for k in chosen]
        columns = zip(*scores, strict=True)
        rewards = [sum(w * s for w, s in zip(weights, row, strict=True)) for row in columns]
        hashes = {self.models[k].name: self.models[k].hash for k in chosen}
        answer: Answer = {"rewards": rewards, "models": hashes}
        if len(chosen) > 1:
            names = [self.models[k].name for k in chosen]
            answer["extra_logs"] = dict(zip(names, map(list, scores), strict=True))
        return answer

    def _chosen(self, name: str | None) -> list[int]:
        """Indices of the models that a request asks."""
        if name is None:
            return list(range(len(self.models)))
        found = [k for k, model in enumerate(self.models) if name in (model.name, model.path)]
        if not found:
            served = ", ".join(model.name for model in self.models)
            raise RefusedError(404, f"not served here; served: {served}", "model")
        return found

    async def _read(self, body: bytes) -> RewardRequest:
        if len(body) <= SMALL_BODY:
            return read_request(body, self._limits)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._helper, read_request, body, self._limits)

    async def _tokenize(self, model: ServedModel, texts: Sequence[str]) -> Tokenized:
        loop = asyncio.get_running_loop()
        rows: list[Row] = []
        truncated: list[bool] = []
        for start, stop in pieces(texts):
            part = await loop.run_in_executor(
                self._helper, model.tokenize, texts[start:stop], start
            )
            rows += part.rows
            truncated += part.truncated
        return Tokenized(rows, truncated)


def still_answers(model: ServedModel) -> bool:
    """Whether a model scores the shortest text."""
    try:
        model.score(SHORTEST)
    except RuntimeError:  # after some errors a GPU answers nothing any more
        return False
    return True


def pieces(texts: Sequence[str]) -> list[tuple[int, int]]:
    """Bounds of runs of texts that are tokenised at once."""
    bounds: list[tuple[int, int]] = []
    start = size = 0
    for index, text in enumerate(texts, start=1):
        size += len(text)
        if size >= CHARS_AT_ONCE or index == len(texts):
            bounds.append((start, index))
            start, size = index, 0
    return bounds
