"""Triton kernels that let device time pass without keeping the device busy: one warp looks at the clock."""

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer


@triton.jit  # pragma: cuda-only
def note_kernel(moment):
    """*moment = now, in nanoseconds."""
    tl.store(moment, globaltimer())


@triton.jit(do_not_specialize=["number"])  # pragma: cuda-only
def wait_kernel(moment, durations, number):
    """End no earlier than `durations`[number] nanoseconds after *moment."""
    until = tl.load(moment) + tl.load(durations + number)
    now = globaltimer()
    while now < until:
        now = globaltimer()
