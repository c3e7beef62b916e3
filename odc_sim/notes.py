"""What a reader of a simulation must know besides its table."""

from collections.abc import Mapping, Sequence

from odc_sim.beyond import beyond
from odc_sim.inputs import Inputs
from odc_sim.plans import Plan
from odc_sim.results import Row
from odc_sim.study import Study

OTHER_STRATEGIES = (
    "not in this table: odc sharding plays DDP and ZeRO-1, which where memory holds them meet once a minibatch without "
    "ODC, and HSDP and PaRO, which send less between nodes"
)
BETWEEN_NODES = "several nodes: odc_kernels has run on the GPUs of one host only, its transfers between hosts have not"


def notes_of(inputs: Inputs, rows: Sequence[Row], plans: Mapping[str, Plan | str]) -> tuple[str, ...]:
    """Sources, assumptions, extrapolations, and what is not the default."""
    several = inputs.study.devices > 1
    nodes = inputs.study.devices > inputs.machine.cluster.devices_per_node
    return (
        *inputs.notes,
        f"compute: {inputs.compute.source}",
        *([inputs.machine.note] if inputs.machine.note else []),
        *beyond(inputs, rows, plans),
        _memory_note(inputs),
        *([OTHER_STRATEGIES] if several else []),
        *([BETWEEN_NODES] if nodes else []),
        *_unusual(inputs.study),
    )


def _memory_note(inputs: Inputs) -> str:
    study, device = inputs.study, inputs.machine.cluster.device
    chunks = (
        f"loss in chunks of {study.chunked_loss_tokens:,} tokens"
        if study.chunked_loss_tokens
        else "loss over all tokens"
    )
    layers = "layers recomputed" if study.recompute else "no recomputation"
    return f"memory: estimate against {device.memory_bytes / 1e9:.1f} GB, recipe {study.recipe}, {layers}, {chunks}"


def _unusual(study: Study) -> list[str]:
    """What differs from the defaults and is not in the table's title, so that no run passes for an ordinary one."""
    fields = (
        *("overlong", "pad_microbatches", "balancing_cost", "batch_minibatches", "barrier", "forward_prefetch"),
        *("backward_prefetch", "collectives", "separate_reduce", "port_contention", "device_speed", "jitter", "engine"),
    )
    return [f"not the default: {name} = {value}" for name, value in study.changed(*fields).items()]
