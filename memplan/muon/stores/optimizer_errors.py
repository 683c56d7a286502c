"""The errors that the optimizer and its stores raise for what a user can cause."""

from collections.abc import Iterable

from memplan.errors import MemplanError, UnknownNameError, unknown_name


class OptimizerError(MemplanError, ValueError):
    """A parameter, gradient, option or checkpoint that the optimizer must not be given.

    It is raised before any parameter or state is touched.
    """


def unknown_choice(kind: str, name: object, known: Iterable[str]) -> UnknownNameError:
    """Return the error for a ``name`` that is none of the few ``known`` ones, all of which it lists."""
    choices = list(known)
    return unknown_name(kind, str(name), choices, hint=", ".join(choices))
