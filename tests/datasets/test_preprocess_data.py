"""The functions that documents of OpenRLHF show for preparing data of one's own."""

import pytest

from openrlhf.datasets import prompts_dataset, reward_dataset, sft_dataset

QUESTION = [{"role": "user", "content": "hi"}]
ASKED = "<|user|>hi<|end|><|assistant|>"


@pytest.mark.parametrize("value", ["hi", QUESTION])
def test_a_prompt_is_text_for_the_model(tiny_tokenizer, value):
    apply = tiny_tokenizer.apply_chat_template
    prepare = prompts_dataset.preprocess_data
    assert prepare({"q": value}, input_key="q", apply_chat_template=apply) == ASKED
    assert prepare({"input": "hi"}) == "hi"
    assert prepare({"input": "hi"}, "User: {}\nAssistant: ") == "User: hi\nAssistant: "


def test_prompt_and_response_are_parts_of_the_dialogue(tiny_tokenizer):
    apply, prepare = tiny_tokenizer.apply_chat_template, sft_dataset.preprocess_data
    parts = (ASKED, "yo<|end|>")
    row = {"q": "hi", "a": "yo", "all": [*QUESTION, {"role": "assistant", "content": "yo"}]}
    found = prepare(row, input_key="q", output_key="a", apply_chat_template=apply)
    assert found == prepare(row, input_key="all", apply_chat_template=apply) == parts
    assert prepare(row, "Q: {} A: ", "q", "a") == ("Q: hi A: ", "yo")


def test_two_answers_have_one_prompt_and_a_margin(tiny_tokenizer):
    apply, prepare = tiny_tokenizer.apply_chat_template, reward_dataset.preprocess_data
    row = {"prompt": "hi", "chosen": "yo", "rejected": "no", "margin": 2}
    found = prepare(row, prompt_key="prompt", apply_chat_template=apply)
    assert found == (ASKED, "yo<|end|>", "no<|end|>", 2.0)
    assert prepare(row, "Q: {} A: ", "prompt") == ("Q: hi A: ", "yo", "no", 2.0)
    assert prepare(row)[:2] == ("", "yo")
    whole = {s: [*QUESTION, {"role": "assistant", "content": s}] for s in ("chosen", "rejected")}
    assert prepare(whole, apply_chat_template=apply) == (
        ASKED,
        "chosen<|end|>",
        "rejected<|end|>",
        0.0,
    )
