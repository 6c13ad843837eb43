#!/usr/bin/env bash
# Trains the small policy on NPROC ranks (1 by default). More options may follow on the command line.
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # a small model: more threads per rank wait more than they compute
NPROC="${NPROC:-1}"

torchrun --standalone --nnodes=1 --nproc_per_node="$NPROC" -m mini_grpo.train \
    --seed 42 \
    --rollouts 4 \
    --prompts_per_rollout 1 \
    --num_generations 4 \
    --gradient_accumulation_steps 4 \
    --sampling_steps 8 \
    --timestep_fraction 0.9 \
    --eval_every 2 \
    "$@"
