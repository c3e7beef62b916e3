"""The exception for what a user typed or supplied, the one for a run that broke, and what the user may have meant."""

import difflib
import sys
from collections.abc import Iterable


class InputError(ValueError):
    """Something the user supplied is wrong. The message is one line: what was got, what was expected, what to do.

    The command line prints it without a traceback and exits with code 2; every other exception is a bug of ours.
    """


class RunError(RuntimeError):
    """A run on hardware could not go on, through no mistake of the user. The message is one line.

    The command line prints it without a traceback and exits with code 1.
    """


def pip_install(extra: str) -> str:
    """The command that installs an extra of ours for this very Python."""
    return pip(f"'odc-toolkit[{extra}]'")


def pip(what: str) -> str:
    """The command that installs `what` for this very Python, and not for the one whose `pip` comes first."""
    return f"{sys.executable} -m pip install {what}"


def unknown_name(kind: str, got: str, options: Iterable[str]) -> InputError:
    """An `InputError` for a name that is not one of `options`, with the closest ones suggested."""
    names = sorted(options)
    found = closest(got, names)
    hint = f"did you mean {found!r}? " if found else ""
    return InputError(f"unknown {kind} {got!r}: {hint}known: {', '.join(names)}")


def closest(got: str, options: Iterable[str]) -> str | None:
    """The option that `got` probably means; None where none is near."""
    names = sorted(options)
    starts = [name for name in names if name.startswith(got) or got.startswith(name)]
    return next(iter(starts or difflib.get_close_matches(got, names, n=1, cutoff=0.5)), None)
