"""Learning-rate schedules by hand."""

import pytest

from mcore_rl.config.schema import LrSchedule, OptimizerConfig
from mcore_rl.schedules import learning_rate


def test_constant_with_warm_up():
    config = OptimizerConfig(lr=1.0, warmup_steps=4)
    assert [learning_rate(config, step, 10) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_cosine():
    config = OptimizerConfig(lr=2.0, warmup_steps=2, schedule=LrSchedule.cosine, min_lr_ratio=0.1)
    values = [learning_rate(config, step, 10) for step in (0, 1, 2, 6, 10, 50)]
    assert values == pytest.approx([1.0, 2.0, 2.0, 1.1, 0.2, 0.2])


def test_cosine_needs_steps():
    with pytest.raises(ValueError, match="cosine needs more than warmup_steps=2"):
        learning_rate(OptimizerConfig(warmup_steps=2, schedule=LrSchedule.cosine), 2, 2)
