"""What agents are tested with: an engine that says what a function tells it to, and shorthands."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from pathlib import Path
from textwrap import dedent

from openrlhf.engines.base import Completion, GenerationRequest, SamplingSettings
from openrlhf.engines.vllm_engine import VLLMEngine
from openrlhf.errors import EngineError
from openrlhf.rollout.agents.episode import AgentSetup, EpisodeRequest, EpisodeResult
from openrlhf.rollout.agents.episodes import agent_rollout_maker
from openrlhf.rollout.rollout import RolloutMaker
from openrlhf.rollout.scoring import FailurePolicy
from openrlhf.utils.agent import AgentError
from openrlhf.utils.rollout import PromptRecord
from tests.rollout.stream_fakes import engine_of, stopped

Say = Callable[[GenerationRequest], Sequence[int]]


def logprob_of(token: int) -> float:
    """The log-prob that the fake engine gives a token."""
    return -0.1 - token % 7 / 10


class StreamingEngine:
    """Samples what `say` answers, cut to the room there is; answers each request by itself, as the
    engine with a step loop does. The version can be moved on.
    """

    sample, _sample = VLLMEngine.sample, VLLMEngine._sample

    def __init__(self, say: Say, *, delay_s: float = 0.0, token_s: float = 0.0) -> None:
        """`delay_s`: before a request is sampled. `token_s`: for each token of it."""
        self.say = say
        self.delay_s = delay_s
        self.token_s = token_s
        self.weight_version = 0
        self.requests: list[GenerationRequest] = []
        self.aborted: set[Future[list[Completion]]] = set()
        self.num_sampled = 0  # tokens

    def complete(self, request: GenerationRequest) -> Completion:
        self.requests.append(request)
        ids = tuple(self.say(request))
        is_cut = len(ids) > request.sampling.max_new_tokens
        ids = ids[: request.sampling.max_new_tokens]
        reason = "length" if is_cut or ids[-1] not in request.sampling.stop_token_ids else "stop"
        return Completion(ids, tuple(map(logprob_of, ids)), reason, self.weight_version)

    def submit(self, requests: Sequence[GenerationRequest]) -> list[Future[list[Completion]]]:
        futures: list[Future[list[Completion]]] = [Future() for _ in requests]
        for work in zip(requests, futures, strict=True):
            if self.delay_s or self.token_s:
                threading.Thread(target=self._answer, args=work, daemon=True).start()
            else:
                self._answer(*work)
        return futures

    def abort(self, futures) -> Future[None]:
        self.aborted.update(futures)
        return stopped()

    def _answer(self, request: GenerationRequest, future: Future[list[Completion]]) -> None:
        time.sleep(self.delay_s)
        with suppress(InvalidStateError):  # cancelled meanwhile
            try:
                whole = self.complete(request)
                for _ in whole.token_ids if self.token_s else ():
                    time.sleep(self.token_s)
                    if future.cancelled():
                        return
                    self.num_sampled += 1
                future.set_result([whole])
            except EngineError as error:
                future.set_exception(error)


def says(tokenizer, text: str, *, end: bool = True) -> Say:
    """An engine's `say` that always writes the same text."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return lambda request: [*ids, tokenizer.eos_token_id] if end else ids


# "two" begins anew in its second turn, which makes a second segment.
TWO_TURNS = """
    from openrlhf.utils.agent import AgentExecutorBase

    class AgentExecutor(AgentExecutorBase):
        async def execute(self, prompt, label, sampling_params, llm_engine):
            if prompt == "bad":
                raise ValueError("bad prompt")
            first = await llm_engine.generate(prompt, sampling_params)
            begin = [] if prompt == "two" else first.prompt_token_ids
            ids = [*begin, *first.outputs[0].token_ids, *llm_engine.encode_feedback("??")]
            await llm_engine.generate(ids, sampling_params)
            return {"reward": len(prompt) / 2, "scores": 1.0, "extra_logs": {"num": 3}}
"""


@contextmanager
def agents_over(
    engines: Sequence[object],
    folder: Path,
    tokenizer,
    *,
    policy: FailurePolicy | None = None,
    code: str = TWO_TURNS,
    **limits,
) -> Iterator[RolloutMaker]:
    """Agents on these engines; they are ended with the block."""
    setup = setup_of(write_agent(folder, code), tokenizer, **{"num_tasks": 4, **limits})
    engines = [engine_of(engine) for engine in engines]
    agents = agent_rollout_maker(setup, engines, policy or FailurePolicy(4))
    try:
        yield agents
    finally:
        agents.loop.run(agents.source.close())
        agents.loop.close()


def settings(tokenizer, **changes) -> SamplingSettings:
    return SamplingSettings(**{"stop_token_ids": (tokenizer.eos_token_id,), **changes})


def prompts(tokenizer, texts: Sequence[str]) -> list[PromptRecord]:
    encoded = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    return [
        PromptRecord(row, text, tuple(ids), label=f"label {row}", columns={"row": row})
        for row, (text, ids) in enumerate(zip(texts, encoded, strict=True))
    ]


def request(tokenizer, text: str = "hi", name: str = "e0", **changes) -> EpisodeRequest:
    ids = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
    sampling = settings(tokenizer, **changes.pop("sampling", {}))
    prompt = PromptRecord(0, text, ids, **{"label": "L", **changes})
    return EpisodeRequest(name, prompt, sampling)


def write_agent(path: Path, code: str) -> Path:
    file = path / "agent_func.py"
    file.write_text(dedent(code))
    return file


def setup_of(file: Path, tokenizer, **limits) -> AgentSetup:
    limits = {"max_length": 256, "step_timeout_s": 20.0, **limits}
    return AgentSetup(str(file), tokenizer, len(tokenizer), **limits)


class EpisodeRunner:
    """Runs single episodes for a test; its event loop has a thread."""

    def __init__(self, setup: AgentSetup, engine) -> None:
        self.agents = agent_rollout_maker(setup, [engine_of(engine)], FailurePolicy(4))

    def close(self) -> None:
        self.agents.loop.run(self.agents.source.close())
        self.agents.loop.close()

    def act(self, requests: Sequence[EpisodeRequest]) -> dict[str, EpisodeResult | AgentError]:
        (worker,) = self.agents.source.workers

        async def run(one: EpisodeRequest) -> EpisodeResult | AgentError:
            try:
                return await worker.run(one)
            except AgentError as error:
                return error

        async def all_of_them() -> list[EpisodeResult | AgentError]:
            return await asyncio.wait_for(asyncio.gather(*map(run, requests)), 30)

        results = self.agents.loop.run(all_of_them())
        return {one.sample_id: result for one, result in zip(requests, results, strict=True)}


def make_runner(file: Path, engine, tokenizer, **limits) -> EpisodeRunner:
    return EpisodeRunner(setup_of(file, tokenizer, **limits), engine)


def act_one(file: Path, engine, tokenizer, **options) -> EpisodeResult | AgentError:
    """One episode of an agent file: its result, or its error."""
    changes = {k: options.pop(k) for k in ("text", "sampling", "label", "columns") if k in options}
    runner = make_runner(file, engine, tokenizer, **options)
    try:
        return runner.act([request(tokenizer, **changes)])["e0"]
    finally:
        runner.close()


# An executor that serves the OpenAI API itself, in front of the engine it is given, and returns
# what was said as tokens. START says where the server begins: with the first episode, or in a
# thread of the constructor.
OPENAI_EXECUTOR = dedent(
    """
    import asyncio, socket, threading, uuid

    import uvicorn
    from fastapi import FastAPI, Request
    from openai import AsyncOpenAI
    from openrlhf.utils.agent import AgentExecutorBase


    class AgentExecutor(AgentExecutorBase):
        def __init__(self):
            super().__init__(None)
            self.sessions = {}
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                self.port = probe.getsockname()[1]
            self.app = FastAPI()
            self.app.post("/v1/chat/completions")(self.chat)
            config = uvicorn.Config(self.app, port=self.port, log_level="error", lifespan="off")
            self.server = uvicorn.Server(config)
            self.serving = None
            if START == "thread":
                self.serving = threading.Thread(target=self.server.run, daemon=True)
                self.serving.start()

        async def started(self):
            if self.serving is None:
                self.serving = asyncio.create_task(self.server.serve())
            while not self.server.started:
                await asyncio.sleep(0.01)

        async def chat(self, request: Request):
            body = await request.json()
            session = self.sessions[request.headers["x-session"]]
            tokenizer, new = session["tokenizer"], body["messages"][session["seen"]:]
            text = tokenizer.apply_chat_template(new, tokenize=False, add_generation_prompt=True)
            ids = session["ids"] + tokenizer(text, add_special_tokens=False)["input_ids"]
            params = session["params"].clone()
            params.max_tokens = min(body["max_tokens"], session["max_length"] - len(ids))
            result = await session["engine"].generate({"prompt_token_ids": ids}, params)
            output = result.outputs[0]
            session["ranges"].append((len(ids), len(ids) + len(output.token_ids)))
            session["ids"] = ids + list(output.token_ids)
            session["seen"] = len(body["messages"]) + 1
            session["truncated"] |= output.finish_reason == "length"
            message = {"role": "assistant", "content": output.text}
            choice = {"index": 0, "message": message, "finish_reason": output.finish_reason}
            return {"id": "c", "object": "chat.completion", "created": 0, "model": body["model"],
                    "choices": [choice]}

        async def execute(
            self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine, images=None
        ):
            await self.started()
            key = uuid.uuid4().hex
            session = self.sessions[key] = {
                "ids": [], "ranges": [], "seen": 0, "truncated": False, "params": sampling_params,
                "max_length": max_length, "tokenizer": hf_tokenizer, "engine": llm_engine,
            }
            client = AsyncOpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none",
                                 default_headers={"x-session": key}, max_retries=0)
            messages = [{"role": "user", "content": prompt}]
            async with client:
                for _ in range(2):
                    answer = await client.chat.completions.create(
                        model="policy", messages=messages,
                        max_tokens=min(sampling_params.max_tokens, 6),
                        temperature=sampling_params.temperature, top_p=sampling_params.top_p,
                    )
                    content = answer.choices[0].message.content
                    messages += [{"role": "assistant", "content": content},
                                 {"role": "user", "content": "again"}]
            reward = sum(map(ord, content)) % 8 / 8
            return {
                "prompt": prompt, "label": label, "reward": reward, "scores": reward,
                "extra_logs": {"num_tokens": len(session["ids"])},
                "observation_tokens": session["ids"], "action_ranges": session["ranges"],
                "truncated": session["truncated"],
            }
    """
)


ENV = """
    from openrlhf.utils.agent import AgentExecutorBase, AgentInstanceBase, MultiTurnAgentExecutor

    class AgentInstance(AgentInstanceBase):
        async def __init__(self, *args, **kwargs):
            self.seen = []

        async def reset(self, states, **kwargs):
            self.label = states["label"]
            return {"observation": states["observation"]}

        async def step(self, states, **kwargs):
            self.seen.append(states["action_text"])
            assert states["label"] == self.label == "L"
            return {
                "rewards": 0.25,
                "scores": 1.0,
                "environment_feedback": "again",
                "done": len(self.seen) == 3,
                "sampling_params": states.get("sampling_params", None),
                "extra_logs": {"num": len(self.seen)},
            }
"""


NEW = """
    class AgentExecutor(MultiTurnAgentExecutor):
        def __init__(self):
            super().__init__(AgentInstance)

        async def execute(
            self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine, images=None
        ):
            return await super().execute(
                prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine, images
            )
"""


OWN_LOOP = """
    class AgentExecutor(AgentExecutorBase):
        def __init__(self, max_steps, max_length, llm_engine, hf_tokenizer, result_queue):
            super().__init__(
                AgentInstance, max_steps, max_length, llm_engine, hf_tokenizer, result_queue
            )

        async def execute(self, prompt, label, sampling_params):
            async with self.semaphore:
                instance = self.agent_instance_cls.remote()
                start = await instance.reset.remote({"observation": prompt, "label": label})
                text, reward, ranges = start["observation"], 0, []
                ids = self.hf_tokenizer(text, add_special_tokens=False)["input_ids"]
                for _ in range(self.max_steps):
                    sampling_params.max_tokens = min(
                        sampling_params.max_tokens, self.max_length - len(ids)
                    )
                    if sampling_params.max_tokens <= 0:
                        break
                    output = (await self.generate(ids, sampling_params.clone())).outputs[0]
                    ranges.append((len(ids), len(ids) + len(output.token_ids)))
                    states = {
                        "observation_text": text,
                        "action_text": output.text,
                        "label": label,
                        "sampling_params": sampling_params,
                    }
                    answer = await instance.step.remote(states)
                    reward += answer["rewards"]
                    feedback = answer["environment_feedback"]
                    text += output.text + feedback
                    ids = ids + output.token_ids
                    if answer["done"]:
                        break
                    ids += self.hf_tokenizer(feedback, add_special_tokens=False)["input_ids"]
                await self.result_queue.put(
                    {
                        "prompt": prompt,
                        "label": label,
                        "reward": reward,
                        "scores": answer["scores"],
                        "extra_logs": answer["extra_logs"],
                        "observation_tokens": ids,
                        "action_ranges": ranges,
                    }
                )
"""


# The environment counts its turns; what is rewarded differs from sample to sample.
ENVIRONMENT = (
    dedent(ENV)
    .replace(' == "L"', "")
    .replace('"rewards": 0.25', '"rewards": sum(map(ord, states["action_text"])) % 8 / 8')
)
