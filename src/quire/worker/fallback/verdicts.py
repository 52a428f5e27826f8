"""The trial of a class that the package's table says nothing about, once for each version and config."""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path
from typing import Any

import transformers

from quire.errors import UnsupportedModelError
from quire.logger import init_logger
from quire.worker.fallback.shrink import shrink_values
from quire.worker.fallback.trial import certify
from quire.worker.kernels.registry import keep_verdict, read_verdict
from quire.worker.packed_cache import cache_root

logger = init_logger(__name__)


def verify(model_class: Any, config: Any) -> None:
    """Tries a class on a small copy of `config`, or recalls what an earlier trial found. Logs a warning.

    Raises UnsupportedModelError if it does not answer as transformers does.
    """
    small = shrink_values(config.to_dict())
    path = _path_of(model_class.__name__, small)
    verdict = read_verdict(path)
    if verdict is None:
        start = time.monotonic()
        verdict = _try(model_class, small)
        logger.info("tried %s in %.1f s: %s", model_class.__name__, time.monotonic() - start, path)
        keep_verdict(path, verdict)
    name = f"{model_class.__name__} of transformers {transformers.__version__}"
    if not verdict["agrees"]:
        raise UnsupportedModelError(f"{name} is not certified, and its trial failed: {verdict['why']}")
    logger.warning("%s is not among the certified models; a small copy of it answered as transformers does", name)


def _try(model_class: Any, small: dict[str, Any]) -> dict[str, Any]:
    try:
        certify(model_class, model_class.config_class.from_dict(small))
    except UnsupportedModelError as e:
        return {"agrees": False, "why": str(e)}
    except Exception as e:
        return {"agrees": False, "why": f"no small copy of it can be made: {type(e).__name__}: {e}".partition("\n")[0]}
    return {"agrees": True, "why": ""}


def _path_of(name: str, small: dict[str, Any]) -> Path:
    """Returns the file of a verdict. It depends on the class, the versions and the small config."""
    facts = json.dumps([name, transformers.__version__, small], sort_keys=True, default=str)
    return cache_root() / "trials" / f"fallback-{name}-{hashlib.sha256(facts.encode()).hexdigest()[:16]}.json"
