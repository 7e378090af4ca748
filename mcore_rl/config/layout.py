"""The layout section as the trainer's layout, checked against itself, the model and the token budget."""

from __future__ import annotations

from mcore_rl.config.schema import LayoutConfig
from parallel.layout import ParallelLayout


def parallel_layout(layout: LayoutConfig) -> ParallelLayout:
    """ValueError for sizes that cannot be arranged."""
    return ParallelLayout(
        world=layout.world,
        tp=layout.tp,
        pp=layout.pp,
        vpp=layout.vpp,
        ep=layout.ep,
        etp=layout.etp,
        cp=layout.cp,
        sp=layout.sp,
        first_stage_layers=layout.first_stage_layers,
        last_stage_layers=layout.last_stage_layers,
    )


def check_token_budget(layout: LayoutConfig, max_model_len: int) -> None:
    """ValueError when a packed row, rounded as the layout needs it, cannot hold the longest sequence."""
    sizes = parallel_layout(layout)
    budget = layout.tokens_per_micro_batch - layout.tokens_per_micro_batch % sizes.token_multiple
    longest = max_model_len + -max_model_len % sizes.segment_multiple
    if longest > budget:
        raise ValueError(
            f"layout.tokens_per_micro_batch={layout.tokens_per_micro_batch}: rows are multiples of {sizes.token_multiple} tokens "
            f"here, so {budget} at most; a sequence of rollout.max_model_len={max_model_len} takes {longest}"
        )
