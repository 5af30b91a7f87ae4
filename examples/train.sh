#!/bin/bash
# Llama 3 8B on two nodes of eight H100 with Megatron-LM, as a team might have it today.
MODEL_ARGS="
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336
    --num-attention-heads 32 --group-query-attention --num-query-groups 8
    --seq-length 8192 --max-position-embeddings 8192
    --position-embedding-type rope --rotary-base 500000
    --normalization RMSNorm --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --vocab-size 128256
    --attention-dropout 0 --hidden-dropout 0 --transformer-impl transformer_engine
"
PARALLEL_ARGS="
    --tensor-model-parallel-size 8 --sequence-parallel
    --pipeline-model-parallel-size 2
    --micro-batch-size 1 --global-batch-size 128
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
    --use-distributed-optimizer --bf16
"
DATA_ARGS="
    --data-path /data/corpus_text_document
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model /models/llama3
"
DISTRIBUTED_ARGS="
    --nnodes ${SLURM_NNODES:-2} --nproc_per_node 8
    --rdzv-backend c10d --rdzv-endpoint $MASTER_ADDR:29500
"
torchrun $DISTRIBUTED_ARGS pretrain_gpt.py $MODEL_ARGS $PARALLEL_ARGS $DATA_ARGS \
    --lr 3e-4 --train-iters 100000
