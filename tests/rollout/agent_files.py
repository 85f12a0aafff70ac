"""Agent files as users of both generations of the reference write them."""

from __future__ import annotations

from textwrap import dedent

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
