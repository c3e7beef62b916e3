"""Where the data folders that come with the toolkit lie: the built-in workloads and the recorded traces."""

from pathlib import Path
from typing import Literal

from odc_sim.errors import InputError

# A file each folder is known by, so that an unrelated folder of the same name is never taken for ours
# (`traces` is also the name of somebody else's package, which would lie beside odc_sim in site-packages).
_MARKERS = {"workloads": "longalign.toml", "traces": "lengths/README.md"}


def data_dir(kind: Literal["workloads", "traces"]) -> Path:
    """The folder of the built-in `kind`.

    A wheel carries the folders inside the package (`odc_sim/_data/<kind>`); in a checkout or an editable install
    they lie beside it (`<repository root>/<kind>`).

    Raises:
        InputError: neither folder exists, so the installation is incomplete.
    """
    return _find(kind, Path(__file__).resolve().parent)


def _find(kind: str, package: Path) -> Path:
    candidates = (package / "_data" / kind, package.parent / kind)
    for folder in candidates:
        if (folder / _MARKERS[kind]).is_file():
            return folder
    looked = " and ".join(str(folder) for folder in candidates)
    raise InputError(
        f"the built-in {kind} are missing: looked for {_MARKERS[kind]} in {looked}; "
        f"reinstall the package, or run from a complete checkout"
    )
