"""What an installation carries, and what importing it loads."""

import ast
import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import odc_sim

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ["pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "Makefile", "cli.py"]
FOLDERS = ["odc_sim", "odc_kernels", "workloads", "traces", "tests"]
IGNORED = shutil.ignore_patterns("__pycache__", "*.nbi", "*.nbc")


@pytest.fixture(scope="session")
def wheel_files(tmp_path_factory):
    """Names in the wheel, built from the sdist, of a copy: building in place would leave files in the repository."""
    copy = tmp_path_factory.mktemp("source")
    for name in SOURCES:
        shutil.copy(ROOT / name, copy / name)
    for name in FOLDERS:
        shutil.copytree(ROOT / name, copy / name, ignore=IGNORED)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", "dist", "."]
    result = subprocess.run(command, cwd=copy, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    (wheel,) = (copy / "dist").glob("*.whl")
    return zipfile.ZipFile(wheel).namelist()


def test_only_our_names_become_importable(wheel_files):
    tops = {name.split("/")[0] for name in wheel_files}
    (metadata,) = (top for top in tops if top.endswith(".dist-info"))
    assert metadata.startswith("odc_toolkit-")
    assert tops - {metadata} == {"cli.py", "odc_kernels", "odc_sim"}


@pytest.mark.parametrize(
    ("folder", "installed"),
    [
        ("workloads", "odc_sim/_data/workloads"),
        ("traces", "odc_sim/_data/traces"),
        ("odc_sim", "odc_sim"),
        ("odc_kernels", "odc_kernels"),
    ],
)
def test_every_file_of_the_folder_is_installed(wheel_files, folder, installed):
    expected = {
        f"{installed}/{path.relative_to(ROOT / folder).as_posix()}"
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix not in {".nbi", ".nbc"}
    }
    assert expected
    assert expected - set(wheel_files) == set()


def run_python(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_importing_every_module_and_help_load_nothing_heavy():
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in (ROOT / "odc_sim").rglob("*.py")]
    code = f"""
import contextlib, importlib, io, json, sys
for name in {modules!r}:
    importlib.import_module(name.removesuffix(".__init__"))
import cli
sys.argv = ["odc", "--help"]
with contextlib.redirect_stdout(io.StringIO()) as help_text:
    try:
        cli.app()
    except SystemExit as stop:
        assert stop.code == 0, stop.code
assert "simulate" in help_text.getvalue()
print(json.dumps(sorted({{"torch", "triton", "nvshmem", "matplotlib", "pandas", "odc_kernels"}} & set(sys.modules))))
"""
    assert json.loads(run_python(code)) == []


def test_importing_the_package_loads_none_of_its_modules():
    loaded = json.loads(run_python("import json, sys, odc_sim; print(json.dumps(sorted(sys.modules)))"))
    assert [name for name in loaded if name.startswith("odc_sim.") or name == "numpy"] == []


def test_the_public_names_resolve_on_first_use():
    assert sorted(odc_sim.__all__) == ["Results", "Study", "plan", "shard", "simulate"]
    assert all(callable(getattr(odc_sim, name)) for name in odc_sim.__all__)
    with pytest.raises(AttributeError, match="no attribute 'simulat'"):
        _ = odc_sim.simulat


def test_the_simulator_never_imports_gpu_packages_even_inside_functions():
    banned = {"torch", "triton", "nvshmem", "odc_kernels"}
    found = []
    for path in (ROOT / "odc_sim").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            else:
                continue
            found += [f"{path.name}: {name}" for name in names if name.split(".")[0] in banned]
    assert found == []
