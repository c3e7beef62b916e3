"""The kernels compiled for sm_90, which needs no GPU, and disassembled: the width of what they do to memory."""

import os
import re
from collections import Counter

import pytest

triton = pytest.importorskip("triton", reason="triton is not installed; `make test-kernels` runs these")
torch = pytest.importorskip("torch", reason="torch is not installed")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("kernels are interpreted in this process", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from odc_kernels import gather, kernels, scatter_accumulate  # noqa: E402

ALL = ("shard_numel", "offset")


def compiled(function, types: dict[str, str], constants: dict, aligned: tuple[str, ...], **options: int):
    """A kernel for sm_90. Pointers and `aligned` arguments are multiples of 16."""
    names = function.arg_names
    pointers = [name for name, kind in types.items() if kind.startswith("*")]
    source = ASTSource(
        fn=function,
        signature={name: "constexpr" if name in constants else types.get(name, "i32") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in (*pointers, *aligned)},
    )
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def disassembled(function, types: dict[str, str], constants: dict, aligned: tuple[str, ...], num_warps: int) -> str:
    """Its SASS."""
    return compiled(function, types, constants, aligned, num_warps=num_warps).asm["sass"]


def memory_instructions(*arguments):
    """How often each load, store and reduction appears."""
    return instructions(disassembled(*arguments))


def instructions(sass: str):
    return Counter(re.findall(r"\b((?:REDG?|ATOMG?|LDG|LDGSTS|STG)\.[.\w]*)", sass))


def push(gradients: str, aligned: tuple[str, ...] = ALL):
    return memory_instructions(
        kernels.push_add_kernel,
        {"gradients": gradients, "addresses": "*i64", "scale": "fp32"},
        {"block": scatter_accumulate.BLOCK},
        aligned,
        scatter_accumulate.NUM_WARPS,
    )


def pull(output: str, window_dtype, aligned: tuple[str, ...] = ALL):
    return memory_instructions(
        kernels.pull_kernel,
        {"addresses": "*i64", "output": output},
        {"window_dtype": window_dtype, "block": gather.BLOCK},
        aligned,
        gather.NUM_WARPS,
    )


VECTOR_RED = "REDG.E.ADD.F32x4.FTZ.RN.STRONG.SYS"


@pytest.mark.parametrize("gradients", ["*fp32", "*bf16"])
def test_additions_are_16_byte_reductions_visible_to_the_system(gradients):
    found = push(gradients)
    assert found[VECTOR_RED] > 0
    reductions = {name for name in found if name.startswith(("RED", "ATOM"))}
    assert reductions == {VECTOR_RED}, "some additions are narrower, or read the old value back"
    assert {name for name in found if name.startswith("LDG")} == {"LDG.E.64", "LDG.E.128"}  # the address; gradients


def test_additions_of_an_odd_shard_stay_vectors_in_whole_tiles():
    found = push("*fp32", aligned=("offset",))
    assert found[VECTOR_RED] > 0
    assert found["REDG.E.ADD.F32.FTZ.RN.STRONG.SYS"] > 0, "the tail"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_lean_push_fits_beside_a_matrix_product_and_keeps_its_loads_in_flight(dtype):
    """What fits: one warp of 32 registers a thread, and 5 KiB of shared memory (reports/kernels-h200/one-gpu)."""
    options = scatter_accumulate.lean_options(dtype.itemsize)
    constants = {name: options.pop(name) for name in ("block", "stages")}
    types = {"gradients": {2: "*bf16", 4: "*fp32"}[dtype.itemsize], "addresses": "*i64", "scale": "fp32"}
    lean = compiled(kernels.push_add_lean_kernel, types, constants, ALL, **options)
    assert options["num_warps"] == 1
    assert lean.metadata.shared == scatter_accumulate.LEAN_SHARED_BYTES
    (registers,) = set(re.findall(r"\.maxnreg (\d+)", lean.asm["ptx"]))
    assert int(registers) <= 32
    sass = lean.asm["sass"]
    assert "STL" not in sass, "registers are spilled"
    found = instructions(sass)
    assert found["LDGSTS.E.BYPASS.128"] >= constants["stages"] - 1, found
    assert found[VECTOR_RED] > 0
    assert {name for name in found if name.startswith(("RED", "ATOM"))} == {VECTOR_RED}


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_pulls_move_16_bytes_a_thread(dtype):
    found = pull(f"*{dtype}", kernels.DTYPES[getattr(torch, {"bf16": "bfloat16", "fp32": "float32"}[dtype])])
    assert {name for name in found if name.startswith("STG")} == {"STG.E.128"}
    assert found["LDG.E.128"] > 0


def test_a_pull_may_cast():
    found = pull("*fp32", kernels.DTYPES[torch.bfloat16])
    assert found["LDG.E.64"] + found["LDG.E.128"] > 1
    assert {name for name in found if name.startswith("STG")} == {"STG.E.128"}


def test_slots_are_added_up_16_bytes_a_thread():
    found = memory_instructions(
        kernels.sum_slots_kernel,
        {"slots": "*fp32", "total": "*fp32", "scale": "fp32"},
        {"block": scatter_accumulate.SUM_BLOCK},
        ("slot_numel", "numel"),
        scatter_accumulate.SUM_WARPS,
    )
    assert {name for name in found if name.startswith(("LDG", "STG"))} == {"LDG.E.128", "STG.E.128"}


def test_a_signal_is_released_to_the_system_and_a_wait_reads_it_again_and_again():
    signal = disassembled(kernels.signal_kernel, {"addresses": "*i64"}, {}, (), 1)
    assert re.search(r"MEMBAR\.\w+\.SYS.*ATOMG\.E\.EXCH\.STRONG\.SYS", signal, re.DOTALL), signal
    wait = disassembled(kernels.wait_kernel, {"flags": "*i32"}, {}, (), 1)
    assert re.search(r"(LBB\d+):[\s\S]*LDG\.E\.STRONG\.SYS[\s\S]*BRA \1;", wait), wait
    assert "CCTL.IVALL" in wait, "what comes after could read stale values"
