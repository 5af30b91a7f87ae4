"""How does nanotron cut a model into pipeline stages?

Read in huggingface/nanotron at 01de8d9 and 2411b02: models/base.py `build_model`, models/llama.py
`get_block_compute_costs`.
"""

from __future__ import annotations

from autoplan.model import ModelSpec


def layers_per_stage(model: ModelSpec, pp: int) -> tuple[int, ...]:
    """Decoder layers of every stage: nanotron balances matrix products, and the head counts as well.

    A block goes to the current stage; once the cost up to and including it reaches the stage's even share of the
    total, the next block opens the next stage.  The source asks for more than the share; that a block which ends
    exactly there closes the stage is what peaks of 1B runs with 2 and 4 stages show (most of them).
    """
    width = model.num_heads * model.qk_head_dim
    layer = 4 * width * model.hidden_size + 3 * model.ffn_size * model.hidden_size
    total = model.num_layers * layer + model.vocab_size * model.hidden_size
    stages = [0] * pp
    stage = 0
    for at in range(1, model.num_layers + 1):
        stages[stage] += 1
        # In whole numbers: at * layer >= total * (stage + 1) / pp.
        if at * layer * pp >= total * (stage + 1) and stage < pp - 1:
            stage += 1
    return tuple(stages)
