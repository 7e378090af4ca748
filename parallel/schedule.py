"""The one caller of Megatron's forward-backward, and the owner of all gradient scaling.

The loss of a global batch is a plain sum over its tokens, so after `run_micro_batches` the gradient of every parameter is
d(sum of all losses of all ranks)/d(parameter), whatever the split into micro-batches and ranks. Megatron averages in three
places, and each is switched off here rather than multiplied back in:
  * the loss divided by the number of micro-batches (and times cp): not done when the loss function also returns a token
    count and the model counts tokens (`calculate_per_token_loss`);
  * gradients divided by the data-parallel size: not done by DistributedDataParallel for such a model;
  * gradients divided by the token count: not done because `finalize_model_grads` is called without one.
Losses that layers attach by themselves (a router's auxiliary loss) are added up in the same way. Megatron's own router
losses are refused: they come multiplied by token counts, differently in each version.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config
from torch import Tensor

from parallel.groups import ProcessGroups

M_contra = TypeVar("M_contra", contravariant=True)
Finish = Callable[[Tensor], tuple[Tensor | None, Any]]


class ForwardStep(Protocol[M_contra]):
    """How one micro-batch goes through one model chunk.

    Returns the chunk's output and `finish`, which is called on the last pipeline stage only, with that output:
    finish(output) -> (loss, value). loss: scalar fp32, the plain sum over this micro-batch's tokens on this rank (None is
    allowed in a forward-only pass). value: whatever the caller wants back.
    """

    def __call__(self, micro_batch: M_contra, chunk: torch.nn.Module) -> tuple[Tensor, Finish]:
        """Run the chunk."""
        ...


def _finalize(model: list[torch.nn.Module], num_tokens: Tensor | None = None, **options: Any) -> None:
    """Megatron's gradient finalization (reductions only), without its division by the number of tokens."""
    del num_tokens
    finalize_model_grads(model, None, **options)


def _refuse_averaging(config: Any) -> None:
    if not config.calculate_per_token_loss:
        raise ValueError("TransformerConfig.calculate_per_token_loss=False averages gradients over ranks: build with True")
    for key in ("moe_aux_loss_coeff", "moe_z_loss_coeff"):
        value = vars(config)[key]
        if any(value) if isinstance(value, list) else value:
            raise ValueError(
                f"TransformerConfig.{key}={value}: Megatron scales it by token counts; attach the loss as a sum instead"
            )


def configure(config: Any, groups: ProcessGroups) -> None:
    """Set what the schedule relies on in Megatron's TransformerConfig. Called for every run: nothing can be forgotten.

    ValueError when the model was built to average (see above).
    """
    _refuse_averaging(config)
    config.grad_scale_func = None
    config.finalize_model_grads_func = _finalize
    config.variable_seq_lengths = groups.layout.pp > 1
    if config.pipeline_dtype is None:
        config.pipeline_dtype = config.params_dtype
    interleaved = groups.layout.chunks > 1
    # Batched point-to-point messages of two ranks that are each other's previous and next stage would be swapped.
    config.overlap_p2p_comm = interleaved
    config.batch_p2p_comm = not interleaved


def _adapt(step: ForwardStep[Any]) -> Callable[..., Any]:
    def forward_step(micro_batches: Iterator[Any], chunk: torch.nn.Module) -> tuple[Tensor, Callable[..., Any]]:
        output, finish = step(next(micro_batches), chunk)

        def loss_function(output: Tensor, non_loss_data: bool = False) -> Any:
            loss, value = finish(output)
            if non_loss_data:
                return value
            if loss is None or loss.dim() != 0:
                raise ValueError("the loss of a training micro-batch must be a scalar: the sum over its tokens")
            return loss, torch.zeros((), dtype=torch.int, device=loss.device), value

        return output, loss_function

    return forward_step


def run_micro_batches(
    chunks: Sequence[torch.nn.Module],
    micro_batches: Sequence[M_contra],
    step: ForwardStep[M_contra],
    *,
    groups: ProcessGroups,
    forward_only: bool,
) -> list[Any]:
    """Run every micro-batch through the model chunks of this rank; with `forward_only=False` also backward.

    Returns the `value` of each micro-batch, in order, on the last pipeline stage; an empty list on the other stages.
    With forward_only=False the gradients in `main_grad` are complete (reduced over data and expert-data parallel ranks,
    tensor-parallel ranks for the norms, pipeline ranks for tied embeddings). Collective: every rank must bring the same
    number of micro-batches, a multiple of `layout.micro_batch_multiple`, or the ranks would wait for each other for ever.
    """
    count = len(micro_batches)
    if count == 0 or count % groups.layout.micro_batch_multiple:
        raise ValueError(
            f"{count} micro-batches: this layout needs at least one, and a multiple of {groups.layout.micro_batch_multiple}"
        )
    if len(chunks) != groups.layout.chunks:
        raise ValueError(f"{len(chunks)} model chunks, but the layout has {groups.layout.chunks} per rank")
    for chunk in chunks:
        configure(get_model_config(chunk), groups)
    iterators = [iter(micro_batches) for _ in chunks]
    forward_backward = get_forward_backward_func()
    with torch.set_grad_enabled(not forward_only):
        return forward_backward(
            forward_step_func=_adapt(step),
            data_iterator=iterators if len(chunks) > 1 else iterators[0],
            model=list(chunks) if len(chunks) > 1 else chunks[0],
            num_microbatches=count,
            # Only read where shapes are fixed, which they are not under pipeline parallelism.
            seq_length=1,
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
