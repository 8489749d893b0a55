"""The PHALANX_* environment variables: those of the core and of all packages, from the one table in the library."""

from dataclasses import dataclass

from phalanx.core._lib import ffi, lib


@dataclass(frozen=True)
class Variable:
    """One environment variable.

    Attributes:
        name: Its name, which begins with ``PHALANX_``.
        reader: The distribution that reads it; "internal" if only tests and developers of Phalanx set it.
        values: The accepted values, in words.
        default: What holds where it is not set, in words.
        meaning: What it does, in Markdown.
    """

    name: str
    reader: str
    values: str
    default: str
    meaning: str

    @property
    def internal(self) -> bool:
        """Whether only tests and developers of Phalanx set it."""
        return self.reader == "internal"


def variables() -> tuple[Variable, ...]:
    """All environment variables that Phalanx reads. Not collective.

    Example:
        >>> [variable.name for variable in variables() if "seconds" in variable.values]
        ['PHALANX_WAIT_WARNING_S']
    """
    lines = ffi.string(lib.phx_environment()).decode().splitlines()
    return tuple(Variable(*line.split("\t")) for line in lines)
