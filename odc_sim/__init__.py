"""Simulate FSDP post-training on uneven sequence lengths, under collectives and under on-demand communication.

`simulate(study)`, `plan(...)`, `shard(study)`, `Study` and `Results` are the Python interface; the command line is
built on the same. They are loaded on first use, so that `import odc_sim` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from odc_sim.api import plan, simulate
    from odc_sim.results import Results
    from odc_sim.sharding_study import shard
    from odc_sim.study import Study

__all__ = ["Results", "Study", "plan", "shard", "simulate"]

_HOME = {
    "simulate": "odc_sim.api",
    "plan": "odc_sim.api",
    "shard": "odc_sim.sharding_study",
    "Study": "odc_sim.study",
    "Results": "odc_sim.results",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
