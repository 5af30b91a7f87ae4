#!/bin/bash
# llama3-8b with A trainer on 32 x hopper-80g (cluster lab), 256 sequences of 4096 tokens a step
# Plan: tp 8 pp 2 dp 2, micro-batch 1, ranks tp-cp-ep-pp-dp, ZeRO-1
# Predicted: 7.31 s per step (90 % interval 6.60 s to 8.10 s), 1,120 tokens/s per device, MFU 43.1 %
# Memory: 71.3 GiB on the fullest device, headroom 7.7 GiB, risk of running out 1.2 %
# Priced as megatron-core, calibration reference, by autoplan 0.1.0 numpy 2.0
# Made from: autoplan search llama3-8b --cluster lab --global-batch 256
# Start: bash mpirun.sh [OPTION ...]; options given there come last and take precedence over launch.sh
# launch.sh lists what the environment may set.
set -euo pipefail
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

unset MASTER_ADDR NODE_RANK  # launch.sh looks them up in the list of nodes

# Open MPI hands on nothing else of the environment.
forwarded=()
for name in PATH LD_LIBRARY_PATH PYTHONPATH MASTER_ADDR MASTER_PORT PREFLIGHT TRAINER_DIR STEPS DATA_ARGS \
    "${!NCCL_@}"; do
    if [[ -v $name ]]; then forwarded+=(-x "$name"); fi
done

exec mpirun -np 4 --map-by ppr:1:node --bind-to none --host node8,node6,node7,node9 \
    "${forwarded[@]}" bash "$HERE/launch.sh" "$@"
