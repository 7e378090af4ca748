"""The rows of configs/algorithm are what was published, and configurations that cannot mean what they say are refused."""

import pytest

from mcore_rl.algorithms.losses import policy_loss
from mcore_rl.algorithms.validate import validate_algorithm
from mcore_rl.config.algorithm import (
    Aggregation,
    AlgorithmConfig,
    Baseline,
    Clip,
    ClipCovConfig,
    CorrectionConfig,
    Denominator,
    KlConfig,
    KlEstimator,
    KlPlacement,
    Overlong,
    RatioLevel,
    SelectionConfig,
    SequenceCorrection,
    TokenCorrection,
)
from mcore_rl.config.compose import compose_config, config_groups

MEAN = Aggregation.seq_mean_token_mean
TOKEN = {"ratio_level": RatioLevel.token, "clip_low": 0.2, "clip_high": 0.2}


@pytest.fixture(scope="module")
def presets():
    return {name: compose_config([f"algorithm={name}"]).algorithm for name in config_groups()["algorithm"]}


def test_presets_are_the_published_axes(presets):
    axes = {name: (a.baseline, a.ratio_level, a.clip, a.clip_low, a.clip_high, a.aggregation) for name, a in presets.items()}
    token, sequence, two_sided = RatioLevel.token, RatioLevel.sequence, Clip.two_sided
    std = Baseline.group_mean_std
    assert axes == {
        "grpo": (std, token, two_sided, 0.2, 0.2, MEAN),
        "grpo_clip_higher": (std, token, two_sided, 0.2, 0.28, Aggregation.token_mean),
        "grpo_pp": (std, token, two_sided, 0.2, 0.28, Aggregation.token_mean),
        "dapo": (std, token, two_sided, 0.2, 0.28, Aggregation.token_mean),
        "dr_grpo": (Baseline.group_mean, token, two_sided, 0.2, 0.2, Aggregation.seq_mean_token_sum_norm),
        "mc_grpo": (Baseline.median_mad, token, two_sided, 0.2, 0.2, MEAN),
        "rloo": (Baseline.leave_one_out, token, two_sided, 0.2, 0.2, Aggregation.seq_mean_token_sum),
        "reinforce": (Baseline.none, token, two_sided, 0.2, 0.2, MEAN),
        "cispo": (std, token, Clip.cispo, 1.0, 4.0, Aggregation.token_mean),
        "sapo": (std, token, Clip.sapo, 3e-4, 4e-4, MEAN),
        "gspo": (std, sequence, two_sided, 3e-4, 4e-4, MEAN),
        "gspo_token": (std, RatioLevel.sequence_token, two_sided, 3e-4, 4e-4, MEAN),
    }


def test_what_single_presets_add(presets):
    assert presets["dr_grpo"].length_norm_tokens == compose_config().rollout.max_tokens
    assert presets["grpo_pp"].clip_cov == ClipCovConfig(fraction=2e-4, low=1.0, high=5.0)
    assert presets["dapo"].selection == SelectionConfig(dynamic_sampling=True, overlong=Overlong.penalty)
    assert (presets["sapo"].sapo_temperature_positive, presets["sapo"].sapo_temperature_negative) == (1.0, 1.05)
    for name, algorithm in presets.items():
        validate_algorithm(algorithm, samples_per_prompt=8)
        recomputed = algorithm.ratio_level is not RatioLevel.token
        correction = CorrectionConfig(denominator=Denominator.trainer if recomputed else Denominator.sampler)
        assert algorithm.kl == KlConfig() and algorithm.correction == correction and not algorithm.entropy_coef, name
        assert (algorithm.selection == SelectionConfig()) == (name != "dapo")
        assert (algorithm.clip_cov == ClipCovConfig()) == (name != "grpo_pp")


def test_the_correction_that_is_switched_on_is_truncation_with_rejection_on_the_sum():
    found = compose_config(["algorithm=grpo", "algorithm.correction.enabled=true"]).algorithm.correction
    assert found.token is TokenCorrection.truncate and found.sequence is SequenceCorrection.sum
    assert found.denominator is Denominator.sampler


REFUSED = [
    ({"aggregation": None}, "aggregation is not set"),
    ({"clip_high": 0.2}, "clip_high=0.2.*never clips"),
    ({"ratio_level": RatioLevel.sequence_token, "clip_low": 0.2}, "clip_low=0.2.*never clips"),
    ({"ratio_level": RatioLevel.token}, "clip_low=0.0003.*nearly every token"),
    ({**TOKEN, "clip_low": 3e-4}, "clip_low=0.0003.*nearly every token"),
    ({"aggregation": Aggregation.seq_mean_token_sum_norm}, "length_norm_tokens=None.*at least 1"),
    ({"aggregation": Aggregation.seq_mean_token_sum_norm, "length_norm_tokens": 0}, "length_norm_tokens=0.*at least 1"),
    ({"clip_low": 0.0}, "clip_low=0"),
    ({**TOKEN, "clip_low": 1.0}, "clip_low=1.0.*below 1"),
    ({**TOKEN, "clip": Clip.dual}, "dual_clip=None"),
    ({**TOKEN, "clip": Clip.dual, "dual_clip": 1.0}, "dual_clip=1.0"),
    ({"dual_clip": 3.0}, "dual_clip=3.0.*clip=dual only"),
    ({"clip": Clip.cispo}, "clip=cispo.*token ratios"),
    ({"clip": Clip.sapo}, "clip=sapo.*token ratios"),
    ({"sapo_temperature_negative": 0.0}, "sapo_temperature_negative=0"),
    ({"clip_cov": ClipCovConfig(fraction=2e-4)}, "clip_cov.fraction=0.0002.*ratio_level=sequence"),
    ({**TOKEN, "clip_cov": ClipCovConfig(fraction=2e-4, low=5.0, high=1.0)}, "clip_cov.low=5.0"),
    ({"kl": KlConfig(coef=-1.0)}, "kl.coef=-1.0"),
    ({"kl": KlConfig(coef=1e-3)}, "kl.placement=reward.*sequence_token"),
    ({"kl": KlConfig(1e-3, KlPlacement.loss, KlEstimator.k1)}, "kl.estimator=k1.*expected gradient is 0"),
    ({**TOKEN, "kl": KlConfig(1e-3, KlPlacement.reward, KlEstimator.k3)}, "kl.estimator=k3"),
    ({"correction": CorrectionConfig(enabled=True, token_cap=0.5)}, "correction.token_cap=0.5"),
    ({"correction": CorrectionConfig(enabled=True, token=TokenCorrection.mask, token_floor=1.5)}, "token_floor=1.5"),
    ({"correction": CorrectionConfig(enabled=True, sequence=SequenceCorrection.mean)}, "sequence_max_nats=0.7.*never rejects"),
    ({"correction": CorrectionConfig(enabled=True, sequence_max_nats=0.0)}, "sequence_max_nats=0.0"),
    ({"selection": SelectionConfig(max_rounds=0)}, "max_rounds=0"),
    ({"selection": SelectionConfig(pass_rate_low=0.9, pass_rate_high=0.2)}, "pass_rate_low=0.9"),
    ({"selection": SelectionConfig(overlong=Overlong.penalty, overlong_buffer=1.0)}, "overlong_buffer=1.0"),
    ({"ddof": 2}, "ddof=2"),
    ({"entropy_coef": float("nan")}, "entropy_coef=nan"),
]


@pytest.mark.parametrize(("changes", "needle"), REFUSED)
def test_refused(changes, needle):
    with pytest.raises(ValueError, match=needle) as refusal:
        policy_loss(AlgorithmConfig(**{"aggregation": MEAN, **changes}))
    assert str(refusal.value).startswith("algorithm.") and "\n" not in str(refusal.value)


def test_accepted():
    validate_algorithm(AlgorithmConfig(aggregation=MEAN), samples_per_prompt=2)
    validate_algorithm(AlgorithmConfig(aggregation=MEAN, clip_high=0.2, allow_wide_sequence_clip=True))
    validate_algorithm(AlgorithmConfig(aggregation=MEAN, ratio_level=RatioLevel.token, allow_narrow_token_clip=True))
    validate_algorithm(AlgorithmConfig(aggregation=MEAN, **TOKEN, clip=Clip.dual, dual_clip=3.0))
    validate_algorithm(AlgorithmConfig(aggregation=MEAN, **TOKEN, kl=KlConfig(coef=1e-3)))
    validate_algorithm(AlgorithmConfig(aggregation=MEAN, kl=KlConfig(1e-3, KlPlacement.loss, KlEstimator.k3)))
    validate_algorithm(AlgorithmConfig(aggregation=MEAN, baseline=Baseline.none), samples_per_prompt=1)


def test_groups_of_one_are_refused():
    with pytest.raises(ValueError, match="samples_per_prompt=1"):
        validate_algorithm(AlgorithmConfig(aggregation=MEAN), samples_per_prompt=1)
