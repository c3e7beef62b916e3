"""Which changes of parameters that were not published are seen in which minibatch."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from odc_kernels.fsdp_drift import BLOCK_BYTES, PARTS, Drift  # noqa: E402

BLOCK = BLOCK_BYTES // 2
"""In bf16."""


def seen(numel, changed, minibatches):
    """In which minibatches, counted from 0, a change of the elements `changed` is found."""
    unit = SimpleNamespace(name="layer", shards=(), device=torch.device("cpu"))
    drift = Drift([unit])
    published = torch.arange(numel, dtype=torch.float32).to(torch.bfloat16)
    found = []
    for minibatch in range(minibatches):
        shard = published.clone()
        shard[changed] += 1000.0
        drift.compare(0, shard, published)
        problem = drift.problem()
        if problem is not None:
            assert problem.startswith("parameters of layer are not what was published")
            found.append(minibatch)
        drift.restart()
    return found


@pytest.mark.parametrize("rest", [0, 4, 3])  # words of 8 bytes, and of 2
@pytest.mark.parametrize("blocks", [8, 19])
def test_a_single_element_is_seen_within_eight_minibatches(blocks, rest):
    numel = blocks * BLOCK + rest
    for block in range(blocks):
        for element in (block * BLOCK, (block + 1) * BLOCK - 1):
            expected = {m for m in range(2 * PARTS) if m % PARTS in (0, block % PARTS)}
            assert seen(numel, [element], 2 * PARTS) == sorted(expected)
    if rest:
        assert seen(numel, [numel - 1], 2 * PARTS) == [0, PARTS]


@pytest.mark.parametrize("start", [0, 1, 5000, 123_457])
def test_a_parameter_of_64_kib_is_seen_at_once(start):
    numel = 40 * BLOCK + 7
    assert seen(numel, slice(start, start + PARTS * BLOCK), 9) == list(range(9))


def test_of_small_units_all_is_compared_always():
    numel = 7 * BLOCK + 100
    assert seen(numel, [numel - 1], 9) == list(range(9))
    assert seen(numel, [], 9) == []


def test_a_nan_is_equal_to_itself():
    drift = Drift([SimpleNamespace(name="layer", shards=(), device=torch.device("cpu"))])
    shard = torch.full((9 * BLOCK,), torch.nan, dtype=torch.bfloat16)
    for _ in range(2):
        drift.compare(0, shard, shard.clone())
        assert drift.problem() is None
        drift.restart()
