#!/bin/bash
# llama3.1-405b with Megatron-LM on 512 x hopper-80g (cluster lab), 256 sequences of 8192 tokens a step
# Plan: tp 8 pp 16 dp 4, micro-batch 1, uneven stages, ZeRO-1
# Predicted: 7.31 s per step (90 % interval 6.60 s to 8.10 s), 1,120 tokens/s per device, MFU 43.1 %
# Memory: 71.3 GiB on the fullest device, headroom 7.7 GiB, risk of running out 1.2 %
# Priced as megatron-core, calibration reference, by autoplan 0.1.0 numpy 2.0
# Made from: autoplan search llama3.1-405b --cluster lab --global-batch 256
# Start: bash THIS_FILE [OPTION ...] on every node, each with its NODE_RANK; options given there come last and take precedence
set -euo pipefail

# Override these in the environment.
MEGATRON_LM_DIR=${MEGATRON_LM_DIR:-.}    # checkout of github.com/NVIDIA/Megatron-LM
TRAIN_ITERS=${TRAIN_ITERS:-100}          # steps
MASTER_ADDR=${MASTER_ADDR:?must be set}  # the node of rank 0
NODE_RANK=${NODE_RANK:?must be set}      # of this node, 0 to 63
MASTER_PORT=${MASTER_PORT:-29500}        # a free port on the node of rank 0

export CUDA_DEVICE_MAX_CONNECTIONS=1  # demanded under tensor or context parallelism

# The model, as far as it costs time and memory: gated MLPs are taken for SwiGLU, others for GELU.
MODEL=(
    --num-layers 126 --hidden-size 16384
    --ffn-hidden-size 53248 --num-attention-heads 128
    --seq-length 8192 --max-position-embeddings 8192
    --vocab-size 128256 --make-vocab-size-divisible-by 128
    --group-query-attention --num-query-groups 8
    --position-embedding-type rope --rotary-base 500000
    --normalization RMSNorm
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --attention-dropout 0.0 --hidden-dropout 0.0
)

# The plan.
PLAN=(
    --micro-batch-size 1 --global-batch-size 256
    --tensor-model-parallel-size 8 --sequence-parallel
    --pipeline-model-parallel-size 16
    --pipeline-model-parallel-layout 'Et*7|(t*8|)*14t*7L'
    --use-distributed-optimizer
    --overlap-grad-reduce --overlap-param-gather
    --bf16
)

# Priced with these, whatever a release defaults to.
LAYERS=(
    --transformer-impl transformer_engine
    --no-create-attention-mask-in-dataloader
)

# Yours to choose; of these only evaluation costs time.
TRAINING=(
    --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --clip-grad 1.0
    --optimizer adam --adam-beta1 0.9 --adam-beta2 0.95
    --weight-decay 0.1 --init-method-std 0.02
    --eval-iters 0 --log-interval 1 --log-throughput
)

# Mock data; DATA_ARGS='--data-path ... --tokenizer-type ...' in the environment replaces it.
DATA=(
    --mock-data
    --tokenizer-type NullTokenizer
)
if [[ -n ${DATA_ARGS:-} ]]; then read -ra DATA <<<"$DATA_ARGS"; fi

# Check that this machine matches the plan.  PREFLIGHT=0 skips the checks.
if [[ ${PREFLIGHT:-1} != 0 ]]; then
    warn() { printf 'preflight on %s: %s\n' "${HOSTNAME:-this node}" "$1" >&2; }
    stop() { warn "$1: PREFLIGHT=0 starts anyway" && exit 1; }
    [[ -f "$MEGATRON_LM_DIR/pretrain_gpt.py" ]] || stop "there is no $MEGATRON_LM_DIR/pretrain_gpt.py: set MEGATRON_LM_DIR"
    if command -v nvidia-smi >/dev/null; then
        query=(nvidia-smi --query-gpu=memory.free --format="csv,noheader,nounits")
        if [[ -n ${CUDA_VISIBLE_DEVICES:-} ]]; then query+=(--id="$CUDA_VISIBLE_DEVICES"); fi
        said=$("${query[@]}") || stop "nvidia-smi fails: $said"
        mapfile -t free <<<"$said"
        if ((${#free[@]} < 8)); then
            stop "8 devices are needed, nvidia-smi lists ${#free[@]}"
        fi
        for at in {0..7}; do
            if [[ ${free[at]} =~ ^[0-9]+$ ]] && ((free[at] < 73012)); then
                stop "device $at has ${free[at]} MiB free, the plan needs 73012 MiB"
            fi
        done
    else
        [[ -e /dev/nvidiactl || -e /dev/dxg ]] || stop "there is neither nvidia-smi nor /dev/nvidiactl: no device of nvidia is here"
        warn "there is no nvidia-smi: devices and their free memory are not checked"
    fi
    if [[ ! -d /dev/infiniband ]]; then
        warn "the plan assumes infiniband, but there is no /dev/infiniband: collectives will be far slower"
    fi
fi

exec torchrun --nnodes 64 --nproc-per-node 8 --node-rank "$NODE_RANK" \
    --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" \
    "$MEGATRON_LM_DIR/pretrain_gpt.py" \
    "${MODEL[@]}" "${PLAN[@]}" "${LAYERS[@]}" "${TRAINING[@]}" "${DATA[@]}" \
    --train-iters "$TRAIN_ITERS" "$@"
