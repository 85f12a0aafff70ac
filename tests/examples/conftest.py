"""Models and data of the example scripts, and a checkout as a reader has it."""

import pytest

from tests.helpers import tiny_vision
from tests.helpers.scripts import SPREAD_REWARD, chat
from tests.tiny import as_openrlhf_saves, make_model, make_reward_model, write_jsonl


@pytest.fixture(scope="module")
def tiny_variables(tmp_path_factory) -> dict[str, str]:
    """A policy, a reward model as OpenRLHF saves it, and eight rows."""
    folder = tmp_path_factory.mktemp("script_models")
    model = make_model(folder / "model", hidden_size=128)
    made = make_reward_model(folder / "made", hidden_size=128)
    as_openrlhf_saves(made, folder / "reward_model", head="value_head")
    rows = [{"question": f"{n}+1=?", "answer": str(n + 1)} for n in range(8)]
    labelled = [{**row, "label": n % 2} for n, row in enumerate(rows)]
    steps = [{"question": f"{n}+1=#{n + 1}#", "label": ["+", "-"]} for n in range(8)]
    pairs = [{"chosen": chat(n, n + 1), "rejected": chat(n, n)} for n in range(8)]
    tiny_vision.noise(28, 28).save(folder / "noise.png")
    images = [{**row, "question": f"<image>{row['question']}"} for row in rows]
    write_jsonl(folder / "images.jsonl", [{**row, "images": ["noise.png"]} for row in images])
    tiny_vision.make("qwen2_5_vl", folder / "vision")
    make_model(folder / "mixture", "mixtral")
    make_model(folder / "two_heads", "llama", num_kv_heads=2)
    (folder / "reward.py").write_text(SPREAD_REWARD)
    write_jsonl(folder / "pairs.jsonl", pairs)
    write_jsonl(folder / "labelled.jsonl", labelled)
    write_jsonl(folder / "steps.jsonl", steps)
    return {
        "TEACHER": str(model),
        "MARKER": "#",
        "MODEL": str(model),
        "REWARD_MODEL": str(folder / "reward_model"),
        "DATA": str(write_jsonl(folder / "rows.jsonl", rows)),
        "INPUT_KEY": "question",
        "OUTPUT_KEY": "answer",
        "LABEL_KEY": "answer",
        "NODES": "1",
        "GPUS": "1",
        "ENGINES": "1",
        "TENSOR_PARALLEL": "1",
    }
