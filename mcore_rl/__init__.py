"""RL post-training of mixture-of-experts models on Megatron-Core and vLLM.

`models` and `parallel` are generic names: if another package of that name comes first on the path, half of this
project would run on foreign code. The guard below refuses that with the intruder's location.
"""

from importlib.util import find_spec
from pathlib import Path

__version__ = "0.1.0"

_ROOT = Path(__file__).resolve().parent.parent
for _name in ("parallel", "models"):
    _spec = find_spec(_name)
    _found = Path(_spec.origin).resolve().parent if _spec is not None and _spec.origin else None
    if _found != _ROOT / _name:
        raise ImportError(
            f"mcore_rl needs its own package {_name!r} at {_ROOT / _name}, but Python finds {_found}; fix sys.path / PYTHONPATH"
        )
