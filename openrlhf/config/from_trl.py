"""TRL's arguments and what they are here: for errors about unknown names, and docs/from-trl.md."""

# TRL's words, with commas between those that mean one thing -> what to type, as Markdown.
OF_ALL = {
    "model_name_or_path": "`--model_name_or_path` or `--pretrain`",
    "dataset_name": "`--dataset_name`, `--dataset`; RL: `--prompt_data`",
    "output_dir": "`--output_dir` or `--save_path`",
    "per_device_train_batch_size": (
        "`--per_device_train_batch_size` or `--micro_train_batch_size`: only memory depends on it"
    ),
    "gradient_accumulation_steps": (
        "no flag: `--train_batch_size` is the whole batch; it is divided by micro-batch and ranks"
    ),
    "max_steps": "no flag: `--max_epochs` (RL: `--num_episodes`) and `--max_samples`",
    "learning_rate": "`--learning_rate`; RL: `--actor_learning_rate`",
    "lr_scheduler_type": "`--lr_scheduler`",
    "warmup_steps, warmup_ratio": "`--lr_warmup_ratio`, a share of all steps",
    "weight_decay": "`--l2`",
    "max_grad_norm": "`--max_norm`",
    "num_train_epochs": "`--num_train_epochs` or `--max_epochs`; RL: `--num_episodes`",
    "bf16": "`--bf16`",
    "fp16": "`--param_dtype fp16`",
    "dtype": "`--param_dtype`",
    "gradient_checkpointing": "`--gradient_checkpointing`",
    "use_liger_kernel, use_liger_loss": "`--use_liger_kernel`",
    "attn_implementation": "`--attn_implementation`",
    "use_peft, lora_r, lora_alpha, lora_target_modules": (
        "`--lora_rank`, `--lora_alpha`, `--target_modules`"
    ),
    "load_in_4bit": "`--load_in_4bit`",
    "deepspeed": "`--deepspeed_config`, or the flags themselves: `--zero_stage 3`",
    "eval_strategy, eval_steps": "`--eval_dataset` with `--eval_steps`",
    "per_device_eval_batch_size": "no flag: evaluation takes the micro-batches of training",
    "save_strategy, save_steps, save_total_limit": "`--save_steps`, `--max_ckpt_num`",
    "load_best_model_at_end": "`--save_best`: the best model is kept beside the last one",
    "metric_for_best_model": "`--save_best METRIC`",
    "resume_from_checkpoint": "`--load_checkpoint`",
    "logging_steps": "`--logging_steps`",
    "run_name": "`--wandb_run_name`",
    "report_to, logging_dir": "`--report_to`; unset: only the run folder",
    "push_to_hub, hub_model_id": "`--push_to_hub YOUR_NAME/YOUR_MODEL`, or `--hub_model_id`",
    "seed": "`--seed`",
    "router_aux_loss_coef": "`--aux_loss_coef`",
    "dataset_train_split": "`--dataset_split`; RL: `--prompt_split`",
    "dataset_test_split": "`--eval_dataset` with `--eval_split`",
}
OF_SUPERVISED = {
    "max_length, max_seq_length": "`--max_length` or `--max_len`",
    "packing, padding_free": "no flag: batches are always packed",
    "dataset_text_field": "`--input_key`, with `--pretrain_mode`",
    "assistant_only_loss": "on; `--multiturn` for every turn",
    "completion_only_loss": "on, except for a column `text`",
    "chat_template_path": "`--tokenizer_chat_template`",
    "chat_template_kwargs": "`--chat_template_kwargs`; `chat_template_kwargs` of a row",
    "label_smoothing": "`--label_smoothing`",
    "precompute_ref_log_probs": "`--precompute_ref_log_probs`",
    "desirable_weight, undesirable_weight": "`--desirable_weight`, `--undesirable_weight`",
}
OF_RL = {
    "reward_funcs": "`--remote_rm_url file.py`; a model: `--reward_pretrain`",
    "reward_weights": "`--reward_weights`, or `reward_weights` in the file",
    "num_generations": "`--num_generations` or `--n_samples_per_prompt`",
    "max_completion_length, max_prompt_length": (
        "`--max_completion_length` or `--generate_max_len`; of the prompt: `--prompt_max_len`"
    ),
    "generation_batch_size, steps_per_generation": (
        "`--rollout_batch_size` (prompts) and `--train_batch_size` (samples)"
    ),
    "num_iterations": "`--max_epochs`",
    "temperature, top_p": "`--temperature`, `--top_p`",
    "top_k, min_p, repetition_penalty": (
        "no flags: training draws by `--temperature` and `--top_p`; `openrlhf eval` has them"
    ),
    "cache_implementation": "no flag: the engine decides",
    "generation_kwargs": "`--stop '</answer>'`, `--stop_token_ids 13`",
    "epsilon, epsilon_high": "`--eps_clip_low_high LOW HIGH`",
    "delta": "`--dual_clip` is the nearest",
    "scale_rewards": "`--no_advantage_std_norm` where it is off",
    "importance_sampling_level": "`--policy_loss_type gspo` for `sequence`",
    "sapo_temperature_pos, sapo_temperature_neg": "`--sapo_tau POS NEG`",
    "mask_truncated_completions": (
        "`--stop_properly_penalty_coef 0` sets their reward to 0 instead, `-1` to -1"
    ),
    "entropy_coef": "`--entropy_loss_coef`",
    "use_vllm, vllm_mode": (
        "vLLM engines are the default, with GPUs of their own (`server`) or `--colocate_all_models`"
        " (`colocate`); `--vllm_num_engines 0` generates without vLLM"
    ),
    "vllm_gpu_memory_utilization": "`--vllm_gpu_memory_utilization`",
    "vllm_tensor_parallel_size": "`--vllm_tensor_parallel_size`",
    "vllm_enable_sleep_mode": "`--vllm_enable_sleep`",
    "vllm_importance_sampling_correction": "`--enable_vllm_is_correction`",
    "vllm_importance_sampling_clip_max": "`--is_correction_threshold`",
    "use_bias_correction_kl": "`--kl_unbiased_gradient`",
    "log_completions, num_completions_to_print": (
        "`--print_samples`; every sample is in `rollouts/`"
    ),
}
# RL's word whose values have names of their own.
OF_VALUES = {"loss_type": "`--loss_aggregation` or `--policy_loss_type`, by its value"}
HERE = {
    word: text
    for table in (OF_ALL, OF_SUPERVISED, OF_RL, OF_VALUES)
    for words, text in table.items()
    for word in words.split(", ")
}
