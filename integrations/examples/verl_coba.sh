#!/usr/bin/env bash
# CoBA-RL's published setting (arXiv 2602.03048) in verl: Qwen2.5-7B, 256 prompts a step with 16 rollouts each on average
# and 2 to 128 each, responses of up to 4096 tokens, learning rate 1e-6, no KL, clip 0.2 / 0.28, avg@16 at top-p 0.9.
#
#   TRAIN=dapo-math-17k.parquet VAL=math500.parquet integrations/examples/verl_coba.sh             one node of 8 GPUs
#   NODES=4 TRAIN=... VAL=... integrations/examples/verl_coba.sh                                   on a Ray cluster
#   ... integrations/examples/verl_coba.sh +coba.tau=3 trainer.total_training_steps=100            further overrides
#
# On more than one node start Ray first: `ray start --head` on the first, `ray start --address=<first>:6379` on the
# others, with coba-core and verl installed on each; then run this on the first.
# The files are in verl's layout: prompt, data_source, reward_model.ground_truth, and extra_info.index, a prompt's key.
set -euo pipefail

: "${TRAIN:?the training data, a Parquet file in the layout of verl}"
: "${VAL:?the validation data, the same}"
MODEL=${MODEL:-Qwen/Qwen2.5-7B-Instruct}
NODES=${NODES:-1}
GPUS=${GPUS:-8}
OUTPUT=${OUTPUT:-checkpoints/coba-qwen2.5-7b}
PROMPT_TOKENS=1024
RESPONSE_TOKENS=4096

# verl does not say why a plugin is missing; this does, and stops.
if [ "$NODES" -gt 1 ]; then
  python3 -c "import ray; from coba_core.integrations import verl; ray.init('auto'); print(verl.check(cluster=True))"
else
  python3 -c "from coba_core.integrations import verl; print(verl.check())"
fi

exec python3 -m verl.trainer.main_ppo \
  trainer.v1.trainer_mode=coba_sync \
  +coba.allocator=coba \
  +coba.low=2 \
  +coba.high=128 \
  +coba.tau=5 \
  +coba.kappa=11 \
  +coba.lam=8 \
  data.train_files="$TRAIN" \
  data.val_files="$VAL" \
  data.train_batch_size=256 \
  data.max_prompt_length=$PROMPT_TOKENS \
  data.max_response_length=$RESPONSE_TOKENS \
  data.filter_overlong_prompts=True \
  data.seed=1 \
  algorithm.adv_estimator=grpo \
  algorithm.use_kl_in_reward=False \
  actor_rollout_ref.model.path="$MODEL" \
  actor_rollout_ref.model.use_remove_padding=True \
  actor_rollout_ref.model.enable_gradient_checkpointing=True \
  actor_rollout_ref.actor.strategy=fsdp2 \
  actor_rollout_ref.actor.optim.lr=1e-6 \
  actor_rollout_ref.actor.ppo_mini_batch_size=64 \
  actor_rollout_ref.actor.use_dynamic_bsz=True \
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$((2 * (PROMPT_TOKENS + RESPONSE_TOKENS))) \
  actor_rollout_ref.actor.use_kl_loss=False \
  actor_rollout_ref.actor.entropy_coeff=0 \
  actor_rollout_ref.actor.clip_ratio_low=0.2 \
  actor_rollout_ref.actor.clip_ratio_high=0.28 \
  actor_rollout_ref.actor.loss_agg_mode=token-mean \
  actor_rollout_ref.actor.fsdp_config.param_offload=True \
  actor_rollout_ref.actor.fsdp_config.optimizer_offload=True \
  actor_rollout_ref.rollout.name=vllm \
  actor_rollout_ref.rollout.n=16 \
  actor_rollout_ref.rollout.temperature=1.0 \
  actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
  actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
  actor_rollout_ref.rollout.val_kwargs.n=16 \
  actor_rollout_ref.rollout.val_kwargs.do_sample=True \
  actor_rollout_ref.rollout.val_kwargs.temperature=1.0 \
  actor_rollout_ref.rollout.val_kwargs.top_p=0.9 \
  trainer.nnodes="$NODES" \
  trainer.n_gpus_per_node="$GPUS" \
  trainer.total_epochs=1000 \
  trainer.total_training_steps=1000 \
  trainer.save_freq=20 \
  trainer.test_freq=20 \
  trainer.project_name=coba \
  trainer.experiment_name="$(basename "$OUTPUT")" \
  trainer.default_local_dir="$OUTPUT" \
  trainer.logger='[console,tensorboard]' \
  "$@"
