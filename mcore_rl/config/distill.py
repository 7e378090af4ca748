"""Fields of on-policy distillation."""

from __future__ import annotations

from dataclasses import dataclass

from mcore_rl.config.dtype import DType


@dataclass
class DistillConfig:
    """`mcore-rl distill`: the student samples, the teacher's opinion of every sampled token is the target.

    teacher: a Hugging Face folder with the student's own tokenizer and chat template. teacher_gpus: the GPUs of its engine,
    as CUDA_VISIBLE_DEVICES has them ("4,5,6,7"); None leaves that to the environment.
    top_k: tokens of the teacher's distribution that are compared one by one; all others share a bucket.
    flat_steps: the run ends once the mean KL of the newer half of that many steps is not flat_nats below the older half's;
    0 never ends early.
    Before the first step teacher and student answer gate_prompts validation prompts greedily: the teacher must be ahead by
    min_lead (a share of the prompts). full_teacher: the teacher at full precision, where `teacher` is a quantised copy; the
    mean KL between the two on the student's answers may be gate_max_kl_nats at most.
    """

    teacher: str | None = None
    teacher_dtype: DType = DType.float32
    teacher_tensor_parallel: int = 1
    teacher_gpus: str | None = None
    top_k: int = 32
    entropy_coef: float = 0.0
    flat_steps: int = 100
    flat_nats: float = 1e-3
    gate_prompts: int = 200
    min_lead: float = 0.05
    full_teacher: str | None = None
    gate_max_kl_nats: float = 0.05
