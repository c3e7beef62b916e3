"""`odc doctor`: what works on this machine, and what to do about the rest. Here what a simulation needs.

A check is a plain function from facts to a `Check`, so that each line it can say is tested; `simulator_checks` gathers
the facts. Those of GPUs, torch and transfers are in odc_kernels.doctor.
"""

import importlib
import importlib.metadata
import os
import platform
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from odc_sim.errors import pip, pip_install

State = Literal["ok", "warning", "broken", "absent"]
OLDEST_PYTHON = (3, 11)
PACKAGES = ("numpy", "pandas", "pyarrow", "numba", "matplotlib", "simpy", "pydantic", "joblib", "typer", "rich")
LEAST_MEMORY_BYTES = 2 << 30
"""A simulation of 1,024 devices took 0.33 GB, and one process a core runs in a sweep."""


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the doctor."""

    name: str
    state: State
    """`ok`; `warning`: works, with a drawback; `broken`: something that is needed does not work; `absent`: not here,
    and nothing else suffers."""
    what: str
    """What was found."""
    remedy: str = ""
    """What to do about it."""


def line(check: Check) -> str:
    """One check for people."""
    remedy = f"  -> {check.remedy}" if check.remedy else ""
    return f"{check.state:8} {check.name:18} {check.what}{remedy}"


def exit_code(checks: Iterable[Check]) -> int:
    """0: everything that simulating, calibrating and training on this machine need works; 1: something is broken."""
    return int(any(check.state == "broken" for check in checks))


def simulator_checks() -> Iterator[Check]:
    """The checks that need nothing but the simulator's own dependencies."""
    yield python(sys.version_info[:3], platform.platform())
    yield packages({name: installed(name) for name in PACKAGES}, importing("numba"))
    yield processors(os.cpu_count(), _memory())
    yield numba_cache(os.environ.get("NUMBA_CACHE_DIR"), writable(Path(__file__).parent), writable(_user_cache()))
    stream = sys.stdout
    yield terminal(stream.isatty(), stream.encoding or "ascii")


def python(version: tuple[int, ...], system: str) -> Check:
    """Python itself."""
    what = f"{'.'.join(map(str, version))} on {system}"
    if version < OLDEST_PYTHON:
        return Check("python", "broken", what, "install Python 3.11 or newer")
    return Check("python", "ok", what)


def packages(versions: Mapping[str, str | None], numba_problem: str | None) -> Check:
    """What the simulator is built on. `versions`: None where a package is not installed."""
    missing = [name for name, version in versions.items() if version is None]
    if missing:
        return Check("packages", "broken", f"not installed: {', '.join(missing)}", pip(" ".join(missing)))
    if numba_problem is not None:
        found = f"numba {versions['numba']} does not load beside numpy {versions['numpy']}: {numba_problem}"
        return Check("packages", "broken", found, f"{pip('--upgrade numba')}, or an older numpy as it says")
    return Check("packages", "ok", ", ".join(f"{name} {versions[name]}" for name in ("numpy", "numba", "pandas")))


def processors(cores: int | None, memory_bytes: int | None) -> Check:
    """Cores of this process and free memory; None where the system does not say."""
    known = [f"{cores} cores"] if cores else []
    if memory_bytes is not None:
        known.append(f"{memory_bytes / 1e9:.1f} GB of memory available")
    what = ", ".join(known) or "unknown"
    if memory_bytes is not None and memory_bytes < LEAST_MEMORY_BYTES:
        return Check(
            "cores and memory", "warning", what, "large simulations and sweeps may not fit: odc sweep --jobs 1"
        )
    return Check("cores and memory", "ok", what)


def numba_cache(chosen: str | None, beside_code: bool, user_cache: bool) -> Check:
    """Whether compiled code is kept on disk. `chosen` is NUMBA_CACHE_DIR, which wins where it is set."""
    name = "numba cache"
    if chosen:
        if writable(Path(chosen)):
            return Check(name, "ok", f"compiled code is kept in {chosen} (NUMBA_CACHE_DIR)")
        found = f"NUMBA_CACHE_DIR={chosen} is not writable: each command compiles anew, which takes seconds"
        return Check(name, "warning", found, "unset NUMBA_CACHE_DIR, or name a folder of yours")
    if beside_code or user_cache:
        return Check(
            name, "ok", f"compiled code is kept {'beside the package' if beside_code else 'in the user cache'}"
        )
    found = "no folder for compiled code is writable: each command compiles anew, which takes seconds"
    return Check(name, "warning", found, "export NUMBA_CACHE_DIR=/tmp/numba")


def terminal(is_terminal: bool, encoding: str) -> Check:
    """Where output goes, and whether it can show more than ASCII."""
    what = f"{'a terminal' if is_terminal else 'not a terminal'}, {encoding}"
    if encoding.lower().replace("-", "").replace("_", "") not in ("utf8", "utf8sig"):
        return Check("output", "warning", f"{what}: tables lose their frames and signs", "export PYTHONUTF8=1")
    return Check("output", "ok", what)


def without_torch(problem: str | None) -> Check:
    """What is missing where torch is not installed, or (`problem`) does not load."""
    can = "simulating, planning and sweeps work; calibrating, training and transfers do not"
    if problem is None:
        return Check("torch", "broken", f"not installed: {can}", pip_install("train"))
    return Check("torch", "broken", f"does not load ({problem}): {can}", "install torch again, for this Python")


def importing(name: str) -> str | None:
    """Why a module does not import, in one line; None where it does."""
    try:
        importlib.import_module(name)
    except Exception as error:  # a broken installation may raise anything
        return first_line(error)
    return None


def first_line(error: BaseException) -> str:
    """What an error says first, or what it is."""
    return next((text.strip() for text in str(error).splitlines() if text.strip()), type(error).__name__)


def installed(package: str) -> str | None:
    """The version of a distribution; None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def writable(folder: Path) -> bool:
    """Whether a file can be made in `folder`, or in what of its parents exists."""
    for place in (folder, *folder.parents):
        if place.is_dir():
            try:
                with tempfile.TemporaryFile(dir=place):
                    return True
            except OSError:
                return False
    return False


def _user_cache() -> Path:
    """Where numba goes if it cannot write beside the code."""
    home = Path(os.environ.get("HOME") or tempfile.gettempdir())
    return Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache") / "numba"


def _memory(path: Path = Path("/proc/meminfo")) -> int | None:
    """Bytes the system could still give; None where it does not say."""
    if not path.exists():
        return None
    for text in path.read_text().splitlines():
        name, _, value = text.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) << 10
    return None
