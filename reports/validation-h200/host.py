"""What the host does for a layer: transformers, with fully_shard, with OnDemand, and with the stamps of the timeline.

    python reports/validation-h200/host.py     writes host.json

One gloo rank without a GPU and a layer so small that its arithmetic takes nothing, so seconds are those of Python, of
torch's own work to call an operation, and of autograd. Each way is a process of its own, several times in turn.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

WAYS = ("transformers", "fully_shard", "OnDemand", "OnDemand, timeline")
LAYERS = 28
CONFIG = {
    "model_type": "qwen2",
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
TURNS, WARM, MINIBATCHES = 5, 5, 30


def run(way: str) -> tuple[float, float]:
    """(forward, backward with recomputation) milliseconds of a layer, median over minibatches of one microbatch."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from odc_kernels.fsdp import OnDemand
    from odc_kernels.lm import build_lm, pack, shard
    from odc_kernels.train_hooks import Hooks
    from odc_kernels.train_recorder import Recorder

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.json"
        config.write_text(json.dumps(CONFIG))
        lm = build_lm(str(config), device=torch.device("cpu"), chunked_loss_tokens=0)
    if way != "transformers":
        shard(lm, init_device_mesh("cpu", (1,)))
    recorder = Recorder(torch.device("cpu"), spans="timeline" in way)
    if "timeline" in way:
        Hooks(recorder, lm, lm.layers)
    odc = OnDemand(lm) if "OnDemand" in way else None
    batch = pack([torch.randint(0, 64, (4,))], 1.0)
    times = []
    for _ in range(WARM + MINIBATCHES):
        recorder.begin()
        recorder.microbatch(0)
        marks = [time.perf_counter()]
        loss = lm(batch)
        marks.append(time.perf_counter())
        loss.backward()
        marks.append(time.perf_counter())
        recorder.end()
        if odc is not None:
            odc.end_of_minibatch()
            odc.publish()
        times.append([1e3 * (b - a) / LAYERS for a, b in pairwise(marks)])
    forward, backward = (statistics.median(part) for part in zip(*times[WARM:], strict=True))
    return forward, backward


def main() -> None:
    """Run all ways in turn."""
    found: dict[str, list[list[float]]] = {way: [] for way in WAYS}
    for turn in range(TURNS):
        for way in WAYS:
            done = subprocess.run(
                [sys.executable, "-W", "ignore", __file__, way], capture_output=True, text=True, check=True
            )
            found[way].append(json.loads(done.stdout.splitlines()[-1]))
            print(turn, way, *(f"{ms:.3f}" for ms in found[way][-1]), file=sys.stderr)
    import torch
    import transformers

    packages = {"torch": torch.__version__, "transformers": transformers.__version__}
    about = {"date": time.strftime("%Y-%m-%d"), "packages": packages, "cores": os.cpu_count()}
    result = {
        **about,
        "milliseconds_a_layer": {way: [[round(ms, 4) for ms in pair] for pair in found[way]] for way in WAYS},
    }
    Path(__file__).with_name("host.json").write_text(json.dumps(result, indent=1) + "\n")
    for way, pairs in found.items():
        print(way, *(f"{statistics.median(part):.2f}" for part in zip(*pairs, strict=True)))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(run(sys.argv[1])), flush=True)
        os._exit(0)
    main()
