"""What a rank does in the model tests: build, load, run packed rows through the pipeline. Imported inside the ranks."""

from pathlib import Path

import torch
import torch.distributed as dist

from models.build import BuildOptions, build_model, forward_packed
from models.registry import read_spec
from models.router import router_pass
from models.weights import load_hf_weights
from parallel.packing import pack_micro_batch


def loaded(groups, folder, **options):
    """(spec, chunks) of this rank, filled from the checkpoint."""
    spec = read_spec(Path(folder))
    chunks = build_model(spec, groups, BuildOptions(**options))
    load_hf_weights(chunks, spec, groups, Path(folder))
    return spec, chunks


def pack(groups, rows):
    """One packed row of these sequences, padded as the layout needs."""
    return pack_micro_batch(rows, range(len(rows)), multiple=groups.layout.token_multiple)


def hidden_shape(groups, spec, tokens):
    """Shape of what travels between pipeline stages."""
    return (tokens // (groups.layout.tp if groups.layout.sp else 1), 1, spec.hidden_size)


def run_pipeline(groups, spec, chunks, micro):
    """Forward one packed row through all stages, without Megatron's schedule; logits on the last stage, else None."""
    output = None
    for number in range(groups.layout.chunks):
        for stage in range(groups.layout.pp):
            if groups.at.pp == stage:
                output = _stage(groups, spec, chunks, micro, (number, stage))
    return output if groups.last_stage else None


def _stage(groups, spec, chunks, micro, place):
    number, stage = place
    pp, ranks = groups.layout.pp, dist.get_process_group_ranks(groups.pp)
    if (number, stage) != (0, 0):
        received = torch.empty(hidden_shape(groups, spec, micro.num_tokens), dtype=chunks[number].config.params_dtype)
        if pp > 1:
            dist.recv(received, src=ranks[(stage - 1) % pp], group=groups.pp)
        chunks[number].set_input_tensor(received)
    output = forward_packed(chunks[number], micro.token_ids, micro.cu_seqlens, micro.max_len)
    if (number, stage) != (groups.layout.chunks - 1, pp - 1):
        dist.send(output.detach().contiguous(), dst=ranks[(stage + 1) % pp], group=groups.pp)
    return output


def whole_logits(groups, local, vocab_size):
    """Logits over the whole vocabulary from this rank's shard; padding rows dropped."""
    if groups.layout.tp == 1:
        return local[:, :vocab_size]
    shards = [torch.empty_like(local) for _ in range(groups.layout.tp)]
    dist.all_gather(shards, local.contiguous(), group=groups.tp)
    return torch.cat(shards, dim=-1)[:, :vocab_size]


def logits_on_rank(groups, device, folder, rows_of_dp, **options):
    """Logits of this data-parallel rank's sequences, in order ([T, V] each); None on earlier pipeline stages."""
    spec, chunks = loaded(groups, folder, **options)
    micro = pack(groups, rows_of_dp[groups.at.dp])
    with torch.no_grad(), router_pass(chunks, "eval", micro.real):
        local = run_pipeline(groups, spec, chunks, micro)
    if local is None:
        return None
    pieces = micro.unpack(whole_logits(groups, local, spec.vocab_size))
    return [pieces[index] for index in sorted(pieces)]
