"""RL commands of users' documents, as they stand there."""

GRPO = r"""
--advantage_estimator group_norm --ref_num_nodes 1 --ref_num_gpus_per_node 8 --reward_num_nodes \
1 --reward_num_gpus_per_node 8 --actor_num_nodes 1 --actor_num_gpus_per_node 8 \
--vllm_num_engines 4 --vllm_tensor_parallel_size 2 --colocate_all_models --pretrain \
OpenRLHF/Llama-3-8b-sft-mixture --reward_pretrain OpenRLHF/Llama-3-8b-rm-700k --save_path \
./output/llama3-8b-grpo --micro_train_batch_size 8 --train_batch_size 128 \
--micro_rollout_batch_size 16 --rollout_batch_size 1024 --max_epochs 1 --bf16 \
--actor_learning_rate 5e-7 --init_kl_coef 0.01 --use_kl_loss --kl_estimator k3 \
--normalize_reward --no_advantage_std_norm
"""
README_PPO = r"""
--ref_num_nodes 1 --ref_num_gpus_per_node 8 --reward_num_nodes 1 --reward_num_gpus_per_node 8 \
--critic_num_nodes 1 --critic_num_gpus_per_node 8 --actor_num_nodes 1 --actor_num_gpus_per_node \
8 --vllm_num_engines 4 --vllm_tensor_parallel_size 2 --colocate_all_models \
--vllm_gpu_memory_utilization 0.5 --pretrain OpenRLHF/Llama-3-8b-sft-mixture --reward_pretrain \
OpenRLHF/Llama-3-8b-rm-700k --save_path /openrlhf/examples/test_scripts/final/llama3-8b-rlhf \
--ckpt_path /openrlhf/examples/test_scripts/ckpt/llama3-8b-rlhf --save_hf_ckpt \
--micro_train_batch_size 8 --train_batch_size 128 --micro_rollout_batch_size 16 \
--rollout_batch_size 1024 --n_samples_per_prompt 1 --max_epochs 1 --prompt_max_len 1024 \
--max_samples 100000 --generate_max_len 1024 --zero_stage 3 --bf16 --actor_learning_rate 5e-7 \
--critic_learning_rate 9e-6 --init_kl_coef 0.01 --prompt_data OpenRLHF/prompt-collection-v0.1 \
--input_key context_messages --apply_chat_template --normalize_reward --gradient_checkpointing \
--packing_samples --vllm_sync_backend nccl --enforce_eager --vllm_enable_sleep \
--deepspeed_enable_sleep --use_wandb {wandb_token}
"""
CHEAT_SHEET = r"""
--pretrain Qwen/Qwen2.5-7B-Instruct --reward_pretrain OpenRLHF/Llama-3-8b-rm-mixture \
--advantage_estimator group_norm --vllm_num_engines 2 --vllm_tensor_parallel_size 1 \
--actor_num_gpus_per_node 4 --colocate_actor_ref --prompt_data your/prompts --input_key prompt \
--save_path ./ckpt --use_wandb $WANDB_API_KEY
"""
