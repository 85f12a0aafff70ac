"""The commands in users' documents parse as they stand there."""

import shlex

import pytest

from openrlhf.config.base import value_at
from openrlhf.config.cli import parse_config
from openrlhf.config.ppo import PPOConfig
from openrlhf.config.serving import LoraCombinerConfig
from openrlhf.config.supervised import DPOConfig, RMConfig, SFTConfig
from tests.helpers.documented import CHEAT_SHEET, GRPO, README_PPO

SFT = r"""
--max_len 4096 --dataset Open-Orca/OpenOrca --input_key question --output_key response \
--input_template 'User: {}
Assistant: ' --train_batch_size 256 --micro_train_batch_size 2 --max_samples 500000 --pretrain \
meta-llama/Meta-Llama-3-8B --save_path ./checkpoint/llama3-8b-sft --save_steps -1 \
--logging_steps 1 --eval_steps -1 --zero_stage 2 --max_epochs 1 --packing_samples --bf16 \
--flash_attn --learning_rate 5e-6 --gradient_checkpointing --use_wandb {wandb_token} 
"""

RM = r"""
--save_path ./checkpoint/llama3-8b-rm --save_steps -1 --logging_steps 1 --eval_steps -1 \
--train_batch_size 256 --micro_train_batch_size 1 --pretrain OpenRLHF/Llama-3-8b-sft-mixture \
--bf16 --max_epochs 1 --max_len 8192 --zero_stage 3 --learning_rate 9e-6 --dataset \
OpenRLHF/preference_dataset_mixture2_and_safe_pku --apply_chat_template --chosen_key chosen \
--rejected_key rejected --flash_attn --packing_samples --gradient_checkpointing --use_wandb \
{wandb_token}
"""

DPO = r"""
--save_path ./output/llama3-8b-dpo --save_steps -1 --logging_steps 1 --eval_steps -1 \
--train_batch_size 256 --micro_train_batch_size 2 --pretrain meta-llama/Meta-Llama-3-8B --bf16 \
--max_epochs 1 --max_len 8192 --zero_stage 3 --learning_rate 5e-7 --beta 0.1 --dataset \
OpenRLHF/preference_dataset_mixture2_and_safe_pku --apply_chat_template --chosen_key chosen \
--rejected_key rejected --flash_attn --gradient_checkpointing
"""

LORA_COMBINER = r"""
--model_path meta-llama/Meta-Llama-3-8B --lora_path ./checkpoint/llama3-8b-rm --output_path \
./checkpoint/llama-3-8b-rm-combined --is_rm --bf16
"""

REWARD_FUNCTION = "--remote_rm_url /path/to/reward_func.py --label_key answer"
PROMPTS = " --prompt_data your/prompts"


COMMANDS = [
    (PPOConfig, README_PPO, "critic.num_gpus_per_node=8 vllm.num_engines=4 "
     "vllm.tensor_parallel_size=2 train.micro_batch_size=8 rollout.micro_batch_size=16 "
     "ds.zero_stage=3 ds.param_dtype=bf16 ds.enable_sleep=True actor.adam.lr=5e-07 "
     "critic.adam.lr=9e-06 critic.gradient_checkpointing_enable=True ckpt.save_hf=True "
     "data.input_key=context_messages data.apply_chat_template=True data.max_samples=100000 "
     "logger.wandb.key=true rollout.n_samples_per_prompt=1"),
    (PPOConfig, GRPO + PROMPTS, "algo.advantage.estimator=group_norm has_critic=False "
     "algo.advantage.no_std_norm=True algo.kl.use_loss=True algo.kl.estimator=k3 "
     "rollout.n_samples_per_prompt=8"),
    (PPOConfig, CHEAT_SHEET, "actor.num_gpus_per_node=4 ref.num_gpus_per_node=4 "
     "rollout.n_samples_per_prompt=8 logger.wandb.key=true"),
    (PPOConfig, f"--pretrain m {REWARD_FUNCTION} {PROMPTS}",
     "reward.remote_url=/path/to/reward_func.py data.label_key=answer"),
    (SFTConfig, SFT, "data.dataset=Open-Orca/OpenOrca data.output_key=response data.max_len=4096 "
     "data.max_samples=500000 train.batch_size=256 train.max_epochs=1 ckpt.save_steps=-1 "
     "ds.attn_implementation=flash_attention_2 ds.packing_samples=True adam.lr=5e-06"),
    (RMConfig, RM + "--value_prefix_head score", "data.max_len=8192 data.prompt_key=None "
     "adam.lr=9e-06 ds.value_head_prefix=score model.loss_type=sigmoid"),
    (DPOConfig, DPO, "model.beta=0.1 adam.lr=5e-07 train.micro_batch_size=2 "
     "ref.model_name_or_path=None ckpt.output_dir=./output/llama3-8b-dpo"),
    (LoraCombinerConfig, LORA_COMBINER, "is_rm=True ds.param_dtype=bf16 "
     "lora_path=./checkpoint/llama3-8b-rm"),
]  # fmt: skip


@pytest.mark.parametrize(("config_class", "command", "meant"), COMMANDS)
def test_a_command_of_the_documents_means_what_it_meant(config_class, command, meant):
    config = parse_config(config_class, shlex.split(command.replace("\\\n", " "))).config
    wanted = dict(word.split("=", 1) for word in meant.split())
    assert {path: str(value_at(config, path)) for path in wanted} == wanted
