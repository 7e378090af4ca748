"""What the answers of a server must hold. Another content is refused (EngineRefused) with what is wrong, never guessed at.

`where` is for messages: the server's name, the route, and the request where there are several.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mcore_rl.errors import EngineRefused

_RESULT_KEYS = {
    "mcore_info": ("pid",),
    "mcore_status": ("names", "error", "active"),
    "mcore_take_routes": ("layers", "top_k", "wide", "requests"),
}
_KINDS = {str: "a string", bool: "true or false", list: "a list", dict: "an object", object: "there"}
_FAILED = ("error", "failed", "failure")
_SHOWN = 200


def field(where: str, content: Any, key: str, kind: type) -> Any:
    """content[key], which must be a `kind`; object: anything, null too."""
    if not isinstance(content, dict) or key not in content:
        raise EngineRefused(f"{where}: '{key}' is missing in {_shown(content)}")
    if not isinstance(content[key], kind):
        raise EngineRefused(f"{where}: '{key}' must be {_KINDS[kind]}, not {_shown(content[key])}")
    return content[key]


def unfailed(where: str, content: Any) -> Any:
    """The content of an answer with status 200, which may report a failure all the same (EngineRefused)."""
    if not isinstance(content, dict):
        return content
    if content.get("error"):
        raise EngineRefused(f"{where}: status 200 with an error: {str(content['error'])[:1000]}")
    if str(content.get("status", "")).lower() in _FAILED:
        raise EngineRefused(f"{where}: status 200 and says that it failed: {_shown(content)}")
    return content


def done(where: str, content: Any) -> None:
    """An answer to something that was to be done: where it says anything of success, it must say true (EngineRefused)."""
    if isinstance(content, dict) and content.get("success", True) is not True:
        raise EngineRefused(f"{where}: status 200 and says that it was not done: {_shown(content)}")


def completion(where: str, answer: Any) -> dict[str, Any]:
    """An output as `EngineLink.generate` has it. What a sample lacks is left out; it is refused where it is counted."""
    request_id, choices = field(where, answer, "request_id", str), field(where, answer, "choices", list)
    if not choices:
        raise EngineRefused(f"{where}: 'choices' is empty")
    choice = choices[0]
    rows = _given(where, _given(where, choice, "logprobs", dict) or {}, "content", list) or []
    spans = _given(where, choice, "weight_versions", list) or []
    return {
        "id": request_id,
        "token_ids": _given(where, choice, "token_ids", list) or [],
        "logprobs": [field(where, row, "logprob", object) for row in rows],
        "finish_reason": _given(where, choice, "finish_reason", str),
        "versions": sorted({field(where, span, "version", str) for span in spans}),
        "routed_experts": _given(where, choice, "routed_experts", str),
    }


def prompt_logprobs(where: str, answer: Any, token_ids: Sequence[int]) -> list[float]:
    """Log-prob of every prompt token after the first."""
    rows = field(where, answer, "prompt_logprobs", list)
    if len(rows) != len(token_ids):
        raise EngineRefused(f"{where}: 'prompt_logprobs' has {len(rows)} entries for {len(token_ids)} tokens")
    found: list[float] = []
    for at in range(1, len(token_ids)):
        here = f"{where}: prompt_logprobs[{at}]"
        value = field(here, field(here, rows[at], str(token_ids[at]), dict), "logprob", object)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise EngineRefused(f"{here}: 'logprob' must be a number, not {_shown(value)}")
        found.append(value)
    return found


def worker_results(where: str, answer: Any, method: str) -> list[Any]:
    """What every worker answered to an extension method, at least one."""
    results = field(where, answer, "results", list)
    if not results:
        raise EngineRefused(f"{where}: '{method}': 'results' is empty; one per worker is needed")
    for result in results:
        if not isinstance(result, dict):
            raise EngineRefused(f"{where}: '{method}': a worker's result must be an object, not {_shown(result)}")
        for key in () if "mcore_refused" in result else _RESULT_KEYS.get(method, ()):
            field(f"{where}: '{method}'", result, key, object)
    return results


def _given(where: str, content: Any, key: str, kind: type) -> Any:
    """As `field`, but None where it is missing or null."""
    if isinstance(content, dict) and content.get(key) is None:
        return None
    return field(where, content, key, kind)


def _shown(content: Any) -> str:
    text = repr(content)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
