"""The operator's settings: frozen dataclasses, one per subject; every flag is one documented field.

Configs are input only: the engine returns values that it discovers at run time (number of blocks, fitted
context length) in `EngineCoreReadyResponse`, and never writes them back here.

Programs for vLLM import `PoolerConfig` and its like from here: the table of `quire.vllm_names` has them.
"""

from functools import partial

from quire.vllm_names import MODULES, attribute

__all__ = list(MODULES[__name__])
__getattr__ = partial(attribute, __name__)
