from pathlib import Path

import pytest

from odc_sim import datafiles
from odc_sim.errors import InputError


def make(folder: Path, kind: str) -> Path:
    marker = folder / kind / datafiles._MARKERS[kind]
    marker.parent.mkdir(parents=True)
    marker.write_text("")
    return folder / kind


@pytest.mark.parametrize("kind", ["workloads", "traces"])
def test_the_real_folders_are_found(kind):
    folder = datafiles.data_dir(kind)
    assert (folder / "README.md").is_file()
    assert folder.name == kind


@pytest.mark.parametrize("kind", ["workloads", "traces"])
def test_a_wheel_carries_them_inside_the_package_and_a_checkout_beside_it(tmp_path, kind):
    package = tmp_path / "odc_sim"
    beside = make(tmp_path, kind)
    assert datafiles._find(kind, package) == beside
    inside = make(package / "_data", kind)
    assert datafiles._find(kind, package) == inside


def test_an_unrelated_folder_of_that_name_is_not_taken_for_ours(tmp_path):
    (tmp_path / "traces").mkdir()
    (tmp_path / "traces" / "__init__.py").write_text("")
    with pytest.raises(InputError) as error:
        datafiles._find("traces", tmp_path / "odc_sim")
    message = str(error.value)
    assert message.startswith("the built-in traces are missing: looked for lengths/README.md in ")
    assert str(tmp_path / "traces") in message
    assert "reinstall the package" in message
    assert "\n" not in message
