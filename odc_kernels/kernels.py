"""The Triton kernels: pull from peers, add into peers, add up slots, signal and wait. Other modules launch them.

The first two walk a list of tiles, tile t of peer (rank + 1 + i) % world_size being entry t * world_size + i, with the
programs striding over it. So every program alternates between peers: all links are busy all the time, the cheap local
part hides behind the links, and no two ranks start on the same peer.

Whole tiles are moved without a mask: a mask whose end is not a multiple of 16 would narrow every access of a shard with
an odd size to one element. With TRITON_INTERPRET=1, set before this module is imported, they run on CPU tensors.
"""

import torch
import triton
import triton.language as tl

DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
"""What a window to pull from may hold."""


@triton.jit(do_not_specialize=["rank", "world_size", "skip_self"])
def pull_kernel(
    addresses,  # int64 [world_size], where each rank's window begins
    output,  # [world_size * shard_numel]
    shard_numel,
    offset,  # in the window, elements
    rank,
    world_size,
    skip_self,  # 1: the own shard of `output` is left as it is
    window_dtype: tl.constexpr,
    block: tl.constexpr,
):
    """output[r * shard_numel : (r + 1) * shard_numel] = window of r [offset : offset + shard_numel], every rank r."""
    num_peers = world_size - skip_self
    num_tiles = tl.cdiv(shard_numel, block) * num_peers
    for entry in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        peer = (rank + 1 + entry % num_peers) % world_size
        start = (entry // num_peers).to(tl.int64) * block
        source = tl.multiple_of(tl.load(addresses + peer).to(tl.pointer_type(window_dtype)), 16)
        lanes = tl.arange(0, block)
        from_ = source + (offset + start) + lanes
        to = output + (peer.to(tl.int64) * shard_numel + start) + lanes
        if start + block <= shard_numel:
            tl.store(to, tl.load(from_).to(output.dtype.element_ty))
        else:
            inside = start + lanes < shard_numel
            tl.store(to, tl.load(from_, mask=inside).to(output.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rank", "world_size"])
def push_add_kernel(
    gradients,  # [world_size * shard_numel]
    addresses,  # int64 [world_size], where each rank's fp32 window begins
    shard_numel,
    offset,  # in the window, elements
    rank,
    world_size,
    scale,
    block: tl.constexpr,
):
    """window of r [offset : offset + shard_numel] += scale * gradients[r * shard_numel : ...], for every rank r.

    Each addition is atomic, so any number of ranks and streams may push at once. Nothing is read back: on sm_90 a
    thread's four additions are one 16-byte reduction that the owner's L2 carries out. Denormals are flushed to zero.
    """
    num_tiles = tl.cdiv(shard_numel, block) * world_size
    for entry in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        peer = (rank + 1 + entry % world_size) % world_size
        start = (entry // world_size).to(tl.int64) * block
        target = tl.multiple_of(tl.load(addresses + peer).to(tl.pointer_type(tl.float32)), 16)
        lanes = tl.arange(0, block)
        from_ = gradients + (peer.to(tl.int64) * shard_numel + start) + lanes
        to = target + (offset + start) + lanes
        if start + block <= shard_numel:
            tl.atomic_add(to, tl.load(from_).to(tl.float32) * scale, sem="relaxed", scope="sys")
        else:
            inside = start + lanes < shard_numel
            values = tl.load(from_, mask=inside).to(tl.float32) * scale
            tl.atomic_add(to, values, mask=inside, sem="relaxed", scope="sys")


@triton.jit(do_not_specialize=["rank", "world_size"])
def push_add_lean_kernel(
    gradients,  # [world_size * shard_numel]
    addresses,  # int64 [world_size], where each rank's fp32 window begins
    shard_numel,
    offset,  # in the window, elements
    rank,
    world_size,
    scale,
    block: tl.constexpr,
    stages: tl.constexpr,
):
    """As `push_add_kernel`, for one warp a multiprocessor: `stages` tiles at a time, all but one of them on their way
    from memory to shared memory, hide the latency that many warps hide there. Program p begins with the p-th peer."""
    program = tl.program_id(0)
    num_whole = shard_numel // block
    lanes = tl.arange(0, block)
    for turn in range(world_size):
        peer = (rank + 1 + (program + turn) % world_size) % world_size
        target = tl.multiple_of(tl.load(addresses + peer).to(tl.pointer_type(tl.float32)), 16)
        from_ = gradients + peer.to(tl.int64) * shard_numel + lanes
        to = target + offset + lanes
        for tile in tl.range(program.to(tl.int64), num_whole, tl.num_programs(0), num_stages=stages):
            start = tile * block
            tl.atomic_add(to + start, tl.load(from_ + start).to(tl.float32) * scale, sem="relaxed", scope="sys")
        if program == num_whole % tl.num_programs(0):
            start = num_whole * block
            inside = start + lanes < shard_numel
            values = tl.load(from_ + start, mask=inside).to(tl.float32) * scale
            tl.atomic_add(to + start, values, mask=inside, sem="relaxed", scope="sys")


@triton.jit(do_not_specialize=["world_size"])
def sum_slots_kernel(
    slots,  # fp32 [world_size * slot_numel]
    total,  # fp32 [numel]; may be the first slot itself
    slot_numel,
    numel,
    world_size,
    scale,
    block: tl.constexpr,
):
    """total = scale * (slots[0] + slots[1] + ...) [: numel], added in this order."""
    start = tl.program_id(0).to(tl.int64) * block
    lanes = tl.arange(0, block)
    from_ = slots + start + lanes
    if start + block <= numel:
        whole = tl.load(from_)
        for _ in range(1, world_size):
            from_ += slot_numel
            whole += tl.load(from_)
        tl.store(total + start + lanes, whole * scale)
    else:
        inside = start + lanes < numel
        part = tl.load(from_, mask=inside)
        for _ in range(1, world_size):
            from_ += slot_numel
            part += tl.load(from_, mask=inside)
        tl.store(total + start + lanes, part * scale, mask=inside)


@triton.jit(do_not_specialize=["rank", "count"])
def signal_kernel(
    addresses,  # int64 [world_size], where each rank's int32 [world_size] flags begin
    rank,
    count,
):
    """flags of r [rank] = count, for every rank r (program r); what this device did before is seen with it."""
    flags = tl.load(addresses + tl.program_id(0)).to(tl.pointer_type(tl.int32))
    tl.atomic_xchg(flags + rank, count, sem="release", scope="sys")


@triton.jit(do_not_specialize=["count"])
def wait_kernel(
    flags,  # int32 [world_size] of this rank
    count,
):
    """Return once each rank r's flag (program r) is at least `count`; what it did before its signal is then seen."""
    flag = flags + tl.program_id(0)
    seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    while seen < count:
        seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
