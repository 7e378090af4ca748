"""What a hybrid model asks of the engine, said before anything starts."""

import pytest

from mcore_rl.config.compose import compose_config
from mcore_rl.config.schema import DType
from mcore_rl.config.validate import validate

HYBRID = ("experiment=quickstart", "model=tiny_hybrid", "sft.steps=0", "device=cpu")


def test_the_model_brings_the_dtype_and_the_bound_of_its_engine():
    """Also beside a sync group that was chosen, and only for this model."""
    config = compose_config([*HYBRID, "sync=paranoid"])
    assert (config.rollout.dtype, config.model.dtype) == (DType.bfloat16, DType.float32)
    assert (config.sync.probe_max_nats, config.sync.probe_mean_nats, config.sync.readback_every) == (5.0, 0.1, 1)
    plain = compose_config(["experiment=quickstart"])
    assert (plain.rollout.dtype, plain.sync.probe_max_nats, plain.sync.probe_mean_nats) == (DType.float32, 1e-3, None)


@pytest.mark.parametrize("layout", ["single", "tp2", "pp2", "ep2"])
def test_every_layout_of_two_ranks_fits(layout):
    validate(compose_config([*HYBRID, f"layout={layout}"]))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.dtype=float32", "rollout.dtype=float32: vLLM computes GatedDeltaNet on a CPU in bfloat16"),
        (
            "model.build.hf_config.linear_key_head_dim=32",
            r"GatedDeltaNet heads of \(32, 64\): vLLM's CPU kernel takes \(64, 128\)",
        ),
    ],
)
def test_what_the_cpu_kernel_cannot_do_is_refused(override, message):
    with pytest.raises(ValueError, match=message):
        validate(compose_config([*HYBRID, override]))


def test_a_server_may_run_on_anything():
    config = compose_config([*HYBRID, "rollout.dtype=float32", "rollout=url", "rollout.url=[http://127.0.0.1:8000]"])
    validate(config)
