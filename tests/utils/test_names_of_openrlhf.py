"""Names of OpenRLHF that its documents and its users' files import."""

import subprocess
import sys
from argparse import Namespace
from importlib import import_module

import pytest

import openrlhf.utils as utils

NAMES = {
    "openrlhf.utils": ["extract_boxed_answer", "grade_answer", "get_tokenizer", "get_strategy"],
    "openrlhf.utils.agent": ["AgentExecutorBase", "AgentInstanceBase"],
    "openrlhf.trainer.ppo_trainer": ["PPOTrainer"],
    "openrlhf.trainer.ppo_utils.experience_maker": ["Experience", "RemoteExperienceMaker"],
    "openrlhf.trainer.ray.ppo_actor": ["PolicyModelActor"],
    "openrlhf.trainer.ray.vllm_engine": ["LLMRayActor", "create_vllm_engines"],
    "openrlhf.trainer.ray.utils": [],
    "openrlhf.datasets.prompts_dataset": ["preprocess_data"],
    "openrlhf.datasets.reward_dataset": ["preprocess_data"],
    "openrlhf.datasets.sft_dataset": ["preprocess_data"],
    **{
        f"openrlhf.cli.{command}": []
        for command in (
            *("train_sft", "train_rm", "train_dpo", "train_kto", "train_prm", "train_kd"),
            *("train_ppo", "train_ppo_ray", "batch_inference", "serve_rm", "lora_combiner"),
            "interactive_chat",
        )
    },
}


@pytest.mark.parametrize("module", NAMES)
def test_every_name_of_the_documents_can_be_imported(module):
    found = import_module(module)
    assert all(hasattr(found, name) for name in NAMES[module])


def test_what_a_trainer_does_is_a_method_of_the_name_that_the_documents_give():
    ppo = import_module("openrlhf.trainer.ppo_trainer").PPOTrainer
    actor = import_module("openrlhf.trainer.ray.ppo_actor").PolicyModelActor
    maker = import_module("openrlhf.trainer.ppo_utils.experience_maker").RemoteExperienceMaker
    assert ppo.train_step and actor.broadcast_to_vllm and maker.make_experience_batch


def test_graded_answers_tokenizer_and_strategy_are_real(tiny_model_dir):
    assert utils.grade_answer(utils.extract_boxed_answer(r"so \boxed{\frac12}"), "0.5")
    assert not utils.grade_answer(utils.extract_boxed_answer("no box"), "0.5")
    model = Namespace(config=Namespace(pad_token_id=None))
    tokenizer = utils.get_tokenizer(str(tiny_model_dir), model, "left", None, use_fast=True)
    assert (tokenizer.padding_side, model.config.pad_token_id) == ("left", tokenizer.pad_token_id)
    args = Namespace(zero_stage=3, bf16=True, seed=7, adam_offload=False, max_norm=1.0, zpg=None)
    strategy = utils.get_strategy(args)
    assert (strategy.ds.zero_stage, strategy.ds.param_dtype, strategy.seed) == (3, "bf16", 7)


def test_the_package_stays_light_until_such_a_name_is_asked_for():
    code = "import sys, openrlhf.utils; print({'torch', 'transformers'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"
