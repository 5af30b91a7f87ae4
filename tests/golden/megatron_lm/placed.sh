#!/bin/bash
# llama3-8b with Megatron-LM on 32 x hopper-80g (cluster lab), 256 sequences of 4096 tokens a step
# Plan: tp 8 pp 2 dp 2, micro-batch 1, ranks tp-cp-ep-pp-dp, ZeRO-1
# Predicted: 7.31 s per step (90 % interval 6.60 s to 8.10 s), 1,120 tokens/s per device, MFU 43.1 %
# Memory: 71.3 GiB on the fullest device, headroom 7.7 GiB, risk of running out 1.2 %
# Priced as megatron-core, calibration reference, by autoplan 0.1.0 numpy 2.0
# Made from: autoplan search llama3-8b --cluster lab --global-batch 256
# Start: bash THIS_FILE [OPTION ...] on every node; options given there come last and take precedence
set -euo pipefail

# Override these in the environment.
MEGATRON_LM_DIR=${MEGATRON_LM_DIR:-.}  # checkout of github.com/NVIDIA/Megatron-LM
TRAIN_ITERS=${TRAIN_ITERS:-100}        # steps
MASTER_PORT=${MASTER_PORT:-29500}      # a free port on the node of rank 0

# In the order of the ranks.
hosts=(
    node8
    node6
    node7
    node9
)
MASTER_ADDR=${MASTER_ADDR:-${hosts[0]}}
if [[ -z ${NODE_RANK:-} ]]; then
    this=${SLURMD_NODENAME:-$(hostname -s)}
    for rank in "${!hosts[@]}"; do
        if [[ ${hosts[rank]%%.*} == "${this%%.*}" ]]; then NODE_RANK=$rank; fi
    done
fi
: "${NODE_RANK:?this node is not in the list of hosts: set NODE_RANK}"

export CUDA_DEVICE_MAX_CONNECTIONS=1  # demanded under tensor or context parallelism

# The model, as far as it costs time and memory: gated MLPs are taken for SwiGLU, others for GELU.
MODEL=(
    --num-layers 32 --hidden-size 4096
    --ffn-hidden-size 14336 --num-attention-heads 32
    --seq-length 4096 --max-position-embeddings 4096
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
    --pipeline-model-parallel-size 2 --use-tp-pp-dp-mapping
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

exec torchrun --nnodes 4 --nproc-per-node 8 --node-rank "$NODE_RANK" \
    --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" \
    "$MEGATRON_LM_DIR/pretrain_gpt.py" \
    "${MODEL[@]}" "${PLAN[@]}" "${LAYERS[@]}" "${TRAINING[@]}" "${DATA[@]}" \
    --train-iters "$TRAIN_ITERS" "$@"
