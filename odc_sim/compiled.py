"""A typed door to numba's compiler. Import only from modules of kernels, and those inside functions: 0.3 s to load."""

from collections.abc import Callable
from typing import TypeVar, cast

from numba import njit

F = TypeVar("F", bound=Callable[..., object])


def compiled(function: F) -> F:
    """Compile on the first call, keep the machine code on disk, and run without the interpreter lock.

    The code on disk is renewed when the file of `function` changes, but not when only the file of a kernel that it
    calls does (also across upgrades): keep kernels that call each other in one file.
    """
    return cast("F", njit(cache=True, nogil=True)(function))
