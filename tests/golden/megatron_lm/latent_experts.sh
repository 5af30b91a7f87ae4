#!/bin/bash
# deepseek-v3 with Megatron-LM on 1024 x hopper-80g (cluster lab), 2048 sequences of 4096 tokens a step
# Plan: tp 2 pp 8 ep 32 dp 64, micro-batch 1, ZeRO-1
# Predicted: 7.31 s per step (90 % interval 6.60 s to 8.10 s), 1,120 tokens/s per device, MFU 43.1 %
# Memory: 71.3 GiB on the fullest device, headroom 7.7 GiB, risk of running out 1.2 %
# Priced as megatron-core, calibration reference, by autoplan 0.1.0 numpy 2.0
# Made from: autoplan search deepseek-v3 --cluster lab --global-batch 2048
# Start: by launch.sbatch
set -euo pipefail

# Override these in the environment.
MEGATRON_LM_DIR=${MEGATRON_LM_DIR:-.}    # checkout of github.com/NVIDIA/Megatron-LM
TRAIN_ITERS=${TRAIN_ITERS:-100}          # steps
MASTER_ADDR=${MASTER_ADDR:?must be set}  # the node of rank 0
MASTER_PORT=${MASTER_PORT:-29500}        # a free port on the node of rank 0
NODE_RANK=$SLURM_NODEID  # of this node, 0 to 127

export CUDA_DEVICE_MAX_CONNECTIONS=1  # demanded under tensor or context parallelism

# The model, as far as it costs time and memory: gated MLPs are taken for SwiGLU, others for GELU.
MODEL=(
    --num-layers 61 --hidden-size 7168
    --ffn-hidden-size 18432 --num-attention-heads 128
    --seq-length 4096 --max-position-embeddings 4096
    --vocab-size 129280 --make-vocab-size-divisible-by 128
    --multi-latent-attention --qk-layernorm --kv-channels 128
    --q-lora-rank 1536
    --kv-lora-rank 512 --qk-head-dim 128
    --qk-pos-emb-head-dim 64 --v-head-dim 128
    --rope-type yarn --rotary-scaling-factor 1.0
    --position-embedding-type rope --rotary-base 10000
    --normalization RMSNorm
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --mtp-num-layers 1
    --attention-dropout 0.0 --hidden-dropout 0.0
)

# Its experts.
EXPERTS=(
    --num-experts 256 --moe-router-topk 8
    --moe-ffn-hidden-size 2048
    --moe-layer-freq '([0]*3+[1]*58)'
    --moe-shared-expert-intermediate-size 2048
    --moe-grouped-gemm --moe-permute-fusion
    --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2
    --moe-router-dtype fp32 --moe-router-padding-for-quantization
)

# The plan.
PLAN=(
    --micro-batch-size 1 --global-batch-size 2048
    --tensor-model-parallel-size 2 --sequence-parallel
    --pipeline-model-parallel-size 8
    --pipeline-model-parallel-layout 'Et*7|(t*8|)*5t*7|t*7mL'
    --expert-model-parallel-size 32 --expert-tensor-parallel-size 1
    --moe-token-dispatcher-type alltoall
    --no-rope-fusion
    --use-distributed-optimizer
    --overlap-grad-reduce --overlap-param-gather
    --bf16 --fp8-format hybrid --fp8-recipe tensorwise
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
    if [[ ${SLURM_NNODES:-128} != 128 ]]; then
        stop "the plan is for 128 nodes of 8 devices, $SLURM_NNODES nodes were given"
    fi
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

exec torchrun --nnodes 128 --nproc-per-node 8 --node-rank "$NODE_RANK" \
    --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" \
    "$MEGATRON_LM_DIR/pretrain_gpt.py" \
    "${MODEL[@]}" "${EXPERTS[@]}" "${PLAN[@]}" "${LAYERS[@]}" "${TRAINING[@]}" "${DATA[@]}" \
    --train-iters "$TRAIN_ITERS" "$@"
