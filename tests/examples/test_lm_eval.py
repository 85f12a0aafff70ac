"""The recipe of docs/evaluation.md: lm-evaluation-harness measures a model that vLLM serves."""

import json
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from urllib.error import URLError

import pytest
import torch
import transformers

from tests.helpers.documents import blocks, commands
from tests.integration.commands import run_command
from tests.source import ROOT
from tests.tiny import make_model

HARNESS = ROOT / ".lm-eval" / "bin" / "lm_eval"
START_S = 200


def model_that_says_4(path: Path) -> Path:
    """A model without attention that says "4" after any token, and ends after a "4"."""
    make_model(path)
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    four, end = tokenizer.convert_tokens_to_ids(["4", tokenizer.eos_token])
    embeddings, head = model.get_input_embeddings().weight, model.lm_head.weight
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        embeddings.zero_()[:, 0] = 1
        embeddings[four] = torch.eye(64)[1]
        head.zero_()[four, 0] = 1
        head[end, 1] = 1
    model.save_pretrained(path)
    return path


def wait_for(server: subprocess.Popen, url: str) -> None:
    for _ in range(START_S):
        try:
            urllib.request.urlopen(url, timeout=1)
            return
        except (URLError, OSError):
            assert server.poll() is None, "the server ended"
            time.sleep(1)
    raise AssertionError("the server did not start")


@pytest.mark.slow
@pytest.mark.skipif(not HARNESS.exists(), reason="make lm-eval installs it")
def test_the_harness_counts_what_a_served_model_gets_right(checkout: Path) -> None:
    page = ROOT / "docs" / "evaluation.md"
    found = [words for block in blocks("bash", page) for words in commands(block, checkout)]
    [serve] = [words[1:] for words in found if "vllm.entrypoints.openai.api_server" in words]
    [ask] = [words[1:] for words in found if words[0] == "lm_eval"]
    shutil.copytree(model_that_says_4(checkout / "model"), checkout / "output" / "grpo")
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = str(probe.getsockname()[1])
    own = ["--port", port]
    with (checkout / "server.log").open("w") as log:
        server = subprocess.Popen([sys.executable, *serve, *own], stdout=log, stderr=log)
    try:
        wait_for(server, f"http://localhost:{port}/health")
        run_command(HARNESS, *[word.replace(":8000", f":{port}") for word in ask])
    finally:
        server.terminate()
        server.wait(timeout=60)
    [results] = (checkout / "output" / "lm-eval").rglob("results*.json")
    # Of 2 + 2, 1 + 3 and 2 + 3.
    measured = json.loads(results.read_text())["results"]["sums"]["exact_match,none"]
    assert measured == pytest.approx(2 / 3)
