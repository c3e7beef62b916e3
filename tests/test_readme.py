"""The README's first screen is what the commands print today, and its Python example runs."""

import re
import shlex
from pathlib import Path

from typer.testing import CliRunner

from cli import app

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


def lines(text):
    return [line.rstrip() for line in text.strip().splitlines()]


def test_the_output_shown_is_the_output(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command, shown = re.search(r"```text\n\$ (odc simulate.*?)\n(.*?)```", README, flags=re.DOTALL).groups()
    result = CliRunner().invoke(app, shlex.split(command)[1:])
    assert result.exit_code == 0
    assert lines(result.stdout) == lines(shown)


def test_the_python_example_runs(capsys):
    (example,) = re.findall(r"```python\n(from odc_sim import Study.*?)```", README, flags=re.DOTALL)
    exec(example, {})  # the README's own code
    assert re.match(r"1\.\d\dx, idle \d", capsys.readouterr().out)


def test_files_it_points_to_exist():
    root = Path(__file__).parent.parent
    for link in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (root / link).exists(), link


def test_every_command_it_names_exists():
    known = {command.name or command.callback.__name__ for command in app.registered_commands}
    named = set(re.findall(r"^    odc ([a-z]+)", README, flags=re.MULTILINE))
    assert named
    assert named <= known
