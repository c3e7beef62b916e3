"""The parts of `odc train` that need no ranks."""

import json
import math
import re
import threading
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed; `make test-kernels` runs these")
pytest.importorskip("transformers", reason="transformers is not installed")

import pyarrow as pa  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402
import torch.distributed as dist  # noqa: E402
from kernels.train_checks import STUDY, config_of, plan_of  # noqa: E402

from odc_kernels.train import _join_torchrun  # noqa: E402
from odc_kernels.train_clock import Exchange, Stamps, offset_s, offset_to_rank_0  # noqa: E402
from odc_kernels.train_data import Synthetic, Tokenized, microbatches  # noqa: E402
from odc_kernels.train_faults import Peak, Place, not_finite, out_of_memory, tokens_that_fit  # noqa: E402
from odc_kernels.train_job import peak_flops, slow_line, waits_line, warmup_minibatches  # noqa: E402
from odc_kernels.train_options import Options, make_job  # noqa: E402
from odc_kernels.train_progress import line  # noqa: E402
from odc_kernels.train_recorder import Recorder  # noqa: E402
from odc_sim.calibration import load_calibration  # noqa: E402
from odc_sim.errors import InputError  # noqa: E402
from odc_sim.models import load_model  # noqa: E402
from odc_sim.plans import write_plan  # noqa: E402
from odc_sim.run_files import StepRow  # noqa: E402

GB = 10**9


def test_the_shortest_round_trip_tells_the_offset():
    # The other clock is 100 s ahead. The second answer took 0.2 s, and was read in the middle of it.
    assert offset_s([Exchange(1.0, 101.4, 2.0), Exchange(3.0, 103.1, 3.2), Exchange(5.0, 106.0, 7.0)]) == pytest.approx(
        100.0
    )


def test_only_ranks_of_other_hosts_ask_for_the_time():
    store = dist.HashStore()
    for _ in range(2):  # a second run of the same ranks
        found = {}

        def ask(rank, found=found):
            found[rank] = offset_to_rank_0(store, rank, ["a", "a", "b"])

        threads = [threading.Thread(target=ask, args=(rank,)) for rank in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found[0] == found[1] == 0.0
        assert 0.0 < abs(found[2]) < 0.05  # here they do share a clock


def test_stamps_of_a_cpu_are_seconds():
    stamps = Stamps(torch.device("cpu"))
    first, second = stamps.take(), stamps.take()
    assert stamps.times_s(first, [second], second) == (first, [second - first])


def test_a_recorder_that_is_off_records_only_a_minibatchs_ends():
    recorder = Recorder(torch.device("cpu"), spans=False)
    recorder.begin()
    with recorder.span("optimizer"):
        pass
    start_s, end_s, rows = recorder.resolve(recorder.end())
    assert start_s < end_s
    assert rows == []


def test_a_rank_runs_its_samples_each_with_the_same_weight():
    plan = plan_of("lb-mini", "collective")  # padded: rank 1 has an empty microbatch
    samples = Synthetic(plan.lengths, 256, seed=0)
    totals = []
    for rank in (0, 1):
        batches = list(microbatches(plan, samples, 0, rank))
        assert [batch.num_tokens for batch in batches][-1] == (1 if rank else batches[-1].num_tokens)
        totals += [float(batch.weights.sum()) for batch in batches]
        ids = plan.nested()[0][rank]
        for batch, microbatch in zip(batches, ids, strict=True):
            if microbatch:
                assert torch.equal(batch.tokens[0], torch.cat([samples.tokens(sample) for sample in microbatch]))
    # FSDP2 divides by the 2 ranks, so together they weigh 2.
    assert sum(totals) == pytest.approx(2.0)
    assert not torch.equal(samples.tokens(0)[:20], samples.tokens(1)[:20])
    assert not torch.equal(samples.tokens(0), Synthetic(plan.lengths, 256, seed=1).tokens(0))


def write_jsonl(path, rows):
    path.write_text("\n".join(json.dumps({"input_ids": row}) for row in rows) + "\n\n")


def test_a_samples_tokens_are_a_row_of_its_length(tmp_path):
    write_jsonl(tmp_path / "b.jsonl", [[1, 2], [3]])
    pq.write_table(pa.table({"input_ids": [[4, 5, 6], [7, 8]], "other": [0, 1]}), tmp_path / "a.parquet")
    (tmp_path / "notes.txt").write_text("not data")
    samples = Tokenized(tmp_path, np.array([2, 1, 2, 3, 2]), vocabulary=9)
    rows = [samples.tokens(sample).tolist() for sample in range(5)]
    assert rows == [[7, 8], [3], [1, 2], [4, 5, 6], [7, 8]]
    assert Tokenized(tmp_path / "b.jsonl", np.array([1]), 9).tokens(0).tolist() == [3]


def test_only_line_feeds_end_a_row(tmp_path):
    rows = [{"text": "a\u2028b\x85c\u2029", "input_ids": [1, 2]}, {"text": "", "input_ids": [3]}]
    text = "\r\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    (tmp_path / "a.jsonl").write_text(text, encoding="utf-8", newline="")
    samples = Tokenized(tmp_path / "a.jsonl", np.array([2, 1]), 9)
    assert [samples.tokens(sample).tolist() for sample in (0, 1)] == [[1, 2], [3]]


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ([[1, 2]], "no row of 3 tokens, as sample 0 of the plan has; plan with the lengths of this data"),
        ([[1, 2, 9]], "row 0 has token 9, expected 0 to 8, the model's vocabulary"),
        ([[1, 2, -1]], "row 0 has token -1"),
        ([[1, 2, 3], "abc"], "row 1: input_ids is 'abc', expected a list of integers"),
        ([[1, [2], 3]], "row 0: input_ids is [1, [2], 3], expected a list of integers"),
        ([[1.5]], "row 0: input_ids is [1.5], expected a list of integers"),
    ],
)
def test_data_that_does_not_fit_is_refused(tmp_path, rows, text):
    write_jsonl(tmp_path / "a.jsonl", rows)
    with pytest.raises(InputError, match=re.escape(text)):
        Tokenized(tmp_path / "a.jsonl", np.array([3]), 9)


def test_files_that_are_no_data_are_refused(tmp_path):
    def refused(path, text):
        with pytest.raises(InputError, match=re.escape(text)):
            Tokenized(path, np.array([3]), 9)

    refused(tmp_path / "none", "no such file or folder")
    refused(tmp_path, "expected .jsonl or .parquet with a column 'input_ids'")
    (tmp_path / "a.jsonl").write_text("{")
    refused(tmp_path, "a.jsonl: line 1 is not valid JSON")
    (tmp_path / "a.jsonl").write_text("[]")
    refused(tmp_path, "a.jsonl: line 1 has no field 'input_ids'")
    (tmp_path / "a.jsonl").write_bytes(b"\xff")
    refused(tmp_path, "a.jsonl: cannot be read")
    (tmp_path / "a.jsonl").unlink()
    (tmp_path / "a.parquet").write_bytes(b"no")
    refused(tmp_path, "a.parquet: cannot be read as Parquet")
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "a.parquet")
    refused(tmp_path, "a.parquet: no column 'input_ids'")


def test_out_of_memory_says_what_would_fit():
    spec, config = load_model("qwen2.5-7b"), config_of("odc", gather_dtype="bf16", world_size=2)
    place = Place(minibatch=3, rank=1, microbatch=2, tokens=200_000)
    free = tokens_that_fit(spec, config, memory_bytes=140 * GB, peak=None)
    # A microbatch of 10,000 tokens took more than the model says, so less fits.
    peak = Peak(tokens=10_000, place="only", num_bytes=120 * GB)
    tight = tokens_that_fit(spec, config, memory_bytes=140 * GB, peak=peak)
    assert 10_000 < tight < free
    text = out_of_memory(place, spec, config, memory_bytes=140 * GB, peak=peak)
    assert text == (
        "out of memory: minibatch 3, rank 1, microbatch 2 of 200,000 tokens on a device of 140.0 GB; "
        f"max_tokens {tight:,} fits by the memory model (scaled to the 120.0 GB that 10,000 took): "
        "plan with --max-tokens"
    )
    # What failed does not fit, whatever the model says.
    text = out_of_memory(place, spec, config, memory_bytes=1000 * GB, peak=None)
    assert "max_tokens 180,000 fits by the memory model (not measured here)" in text
    assert "no max_tokens fits" in out_of_memory(place, spec, config, memory_bytes=GB, peak=None)


def test_what_is_not_finite_is_told_with_its_minibatch():
    assert not_finite(7, float("nan"), float("inf")).startswith("minibatch 7: loss nan, gradient norm inf: not finite")


def test_warming_up_begins_with_the_largest_microbatch():
    plan = plan_of("lb-mini", "odc")
    largest = int(np.argmax(plan.tokens()) >= plan.rank_start[2])
    assert warmup_minibatches(plan, 0, 2) == []
    assert warmup_minibatches(plan, 4, 2) == [largest, 0, 1, 0]


def test_the_peak_is_that_of_the_gpu_by_its_name():
    assert peak_flops("NVIDIA H200", None) == 989e12
    assert peak_flops("NVIDIA A100-SXM4-80GB", None) == 312e12
    assert np.isnan(peak_flops("", None))
    calibration = load_calibration(Path(__file__).parents[1] / "data/calibration-small.json")
    assert peak_flops("", calibration) == calibration.ceilings.gemm_flops


def test_a_line_leaves_out_what_was_not_measured():
    row = StepRow(
        **{"minibatch": 3, "loss": 1.5, "grad_norm": 2.0, "makespan_s": 0.5, "tokens": 1000, "samples": 8},
        **{"mfu": float("nan"), "idle_rate": 0.25, "peak_memory_bytes": 0},
    )
    assert line(row) == "minibatch 3  loss 1.5000  norm 2.000  0.500 s  2,000 tokens/s  idle 25.0%"


def make(fields=None, *, config=None, out=Path("unused"), resume=False, **options):
    return make_job(
        Options(device="cpu", **options) if not resume else Options(**options),
        fields or {},
        **{"config": config, "out": out, "resume": resume, "timeline": True, "command": "odc train"},
    )


def test_flags_that_are_not_given_are_filled_in():
    job = make({"model": "tiny", "scale": 0.01}, steps=3)
    assert (job.plan.world_size, job.plan.num_minibatches, job.plan.policy) == (2, 3, "lb-mini")
    assert (job.config.schedule, job.config.steps, job.config.gather_dtype) == ("odc", 3, "fp32")
    job = make(
        {"model": "tiny", "gather_dtype": "bf16", "devices": 3, "minibatches": 4}, schedule="collective", steps=2
    )
    assert (job.plan.world_size, job.plan.num_minibatches, job.plan.policy) == (3, 4, "lb-micro")
    assert (job.config.steps, job.config.gather_dtype, job.config.hardware) == (2, "bf16", "")
    assert make({"model": "tiny"}, compute="emulated").config.hardware == "a100-nvswitch-roce"


def test_emulated_compute_says_whose_time_it_takes():
    job = make({"model": "qwen2.5-1.5b", "scale": 0.01}, compute="emulated", steps=1)
    assert waits_line(job) == (
        "emulated: units wait as on a100-nvswitch-roce (A100 fit of qwen2.5-1.5b in the paper's reference code); "
        "--calibration or --hardware: as on another machine"
    )


def test_long_microbatches_on_cpus_are_warned_of():
    assert slow_line(make({"model": "tiny"}, steps=1)) == (
        "microbatches to 51,542 tokens take CPUs long, minutes from 64K; a smaller --scale makes samples shorter"
    )
    assert slow_line(make({"model": "tiny", "scale": 0.1}, steps=1)) == ""
    assert slow_line(make({"model": "tiny"}, compute="emulated", steps=1)) == ""


def test_a_plan_file_is_what_is_run(tmp_path):
    plan = plan_of("lb-mini", "odc")
    write_plan(plan, tmp_path / "plan.json", "")
    job = make({"plan": tmp_path / "plan.json"})
    assert job.model == job.config.model == "tiny"
    assert job.plan.lengths.tolist() == plan.lengths.tolist()
    assert job.config.steps == STUDY.minibatches
    with pytest.raises(InputError, match=r"--devices 8 contradicts .*plan\.json"):
        make({"plan": tmp_path / "plan.json", "devices": 8})


def test_a_study_file_and_a_model_of_ones_own(tmp_path):
    tiny = {"model_type": "qwen2", "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    tiny |= {"num_hidden_layers": 1, "intermediate_size": 64, "vocab_size": 50}
    (tmp_path / "mine.json").write_text(json.dumps(tiny))
    (tmp_path / "study.toml").write_text('model = "mine.json"\nminibatches = 2\npolicy = "ffd"\nrecompute = false\n')
    job = make(config=tmp_path / "study.toml")
    assert job.config.model == "model.json"
    assert job.model == str(tmp_path / "mine.json")
    assert (job.config.policy, job.config.recompute) == ("ffd", False)


@pytest.mark.parametrize(
    ("fields", "options", "text"),
    [
        ({}, {"schedule": "ocd"}, "unknown schedule 'ocd': did you mean 'odc'?"),
        ({}, {"compute": "fake"}, "unknown compute 'fake'"),
        ({}, {"steps": 0}, "--steps: got 0, expected a number of at least 1"),
        ({}, {"max_grad_norm": math.inf}, "--max-grad-norm: got inf, expected a number of at least 0"),
        ({}, {"learning_rate": math.nan}, "--learning-rate: got nan, expected a number of at least 0"),
        ({}, {"time_scale": 0.0, "compute": "emulated"}, "--time-scale: got 0.0, expected a number above 0"),
        ({}, {"time_scale": math.inf, "compute": "emulated"}, "--time-scale: got inf, expected a number above 0"),
        ({}, {"time_scale": 2.0}, "--time-scale: only emulated compute has one; add --compute emulated"),
        ({"policy": "ffd,bfd"}, {}, "--policy: got ffd, bfd, expected one: a run is one plan"),
        ({"lengths": Path("nowhere.txt")}, {}, "nowhere.txt"),
    ],
)
def test_flags_that_make_no_sense_are_refused(fields, options, text):
    with pytest.raises(InputError, match=re.escape(text)):
        make(fields, **options)


def test_no_gpu_is_told_at_once():
    if not torch.cuda.is_available():
        with pytest.raises(InputError, match="--device cuda: no GPU here; use --device cpu"):
            make_job(
                Options(device="cuda"),
                {},
                **{"config": None, "out": Path("a"), "resume": False, "timeline": True, "command": ""},
            )


def test_a_run_that_is_resumed_takes_no_other_settings(tmp_path):
    for fields, options, name in (
        ({"devices": 3}, {}, "devices"),
        ({}, {"schedule": "odc"}, "schedule"),
        ({}, {"learning_rate": 1.0}, "learning-rate"),
    ):
        with pytest.raises(InputError, match=f"--{name} with --resume: a run goes on as it was started; leave it out"):
            make(fields, resume=True, out=tmp_path, **options)
    with pytest.raises(InputError, match=r"holds no plan\.json"):
        make(resume=True, out=tmp_path)


def test_torchrun_must_start_as_many_ranks_as_are_planned(monkeypatch):
    job = make({"model": "tiny", "scale": 0.01}, steps=1)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "5")
    with pytest.raises(InputError, match=f"torchrun started 5 ranks, the plan is for {job.plan.world_size}"):
        _join_torchrun(job)
