"""Checkpoints of a run: run/checkpoint/minibatch-N, where N minibatches were finished. Only the newest is kept."""

import re
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from odc_sim.errors import InputError

FOLDER = "checkpoint"
COMPLETE = ".metadata"
"""torch writes this file last, so a checkpoint that has it is whole."""


def newest(run: Path) -> tuple[int, Path]:
    """(minibatches finished, folder) of the newest whole checkpoint of a run.

    Raises:
        InputError: there is none.
    """
    found = [
        (int(match.group(1)), folder)
        for folder in (run / FOLDER).glob("minibatch-*")
        if (match := re.fullmatch(r"minibatch-(\d+)", folder.name)) and (folder / COMPLETE).is_file()
    ]
    if not found:
        raise InputError(f"{run}: has no checkpoint to resume from; train with --checkpoint-every N")
    return max(found)


def save(
    run: Path, finished: int, model: nn.Module, optimizer: torch.optim.Optimizer, group: dist.ProcessGroup
) -> None:
    """Write parameters and optimizer after `finished` minibatches, then delete older checkpoints. Collective."""
    folder = run / FOLDER / f"minibatch-{finished}"
    dcp.save(_state(model, optimizer), checkpoint_id=folder, process_group=group)
    dist.barrier(group)
    if dist.get_rank(group) == 0:
        for other in (run / FOLDER).glob("minibatch-*"):
            if other != folder:
                shutil.rmtree(other)


def load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, group: dist.ProcessGroup) -> None:
    """Read them into a model and an optimizer of the same run. Collective."""
    state = _state(model, optimizer)
    dcp.load(state, checkpoint_id=folder, process_group=group)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    parameters, moments = get_state_dict(model, optimizer)
    return {"model": parameters, "optimizer": moments}
