"""The module ``light_mem``, by Lookaside: code that was written for LightMem runs unchanged.

It is a distribution of its own. Were it a part of lookaside-kv, installing that would overwrite a
LightMem that is installed.
"""

from lookaside.light_mem import PyLocalCacheService, PyState, PyTask

__all__ = ["PyLocalCacheService", "PyState", "PyTask"]
