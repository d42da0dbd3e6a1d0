"""libmtmd, the part of llama.cpp that reads images, which a build may lack."""

from types import ModuleType

from dflash_local.errors import BackendError
from dflash_local.llama import runtime


def libmtmd() -> ModuleType:
    """llama-cpp-python's module of it. Raises BackendError where that was built without."""
    try:
        from llama_cpp import mtmd_cpp
    except (ImportError, OSError, RuntimeError):
        raise BackendError(
            "this llama-cpp-python was built without libmtmd, which reads images: set it up again "
            "with `python3 bootstrap.py --gpu cuda`, or vulkan, metal, none; see docs/install.md"
        ) from None
    runtime.take_log_of(mtmd_cpp.mtmd_helper_log_set)
    return mtmd_cpp
