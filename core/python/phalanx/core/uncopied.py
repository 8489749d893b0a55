"""Objects that own something of this process, and so cannot be copied or pickled."""

from typing import NoReturn, SupportsIndex


class Uncopied:
    """A base of classes whose copies would release what the original owns."""

    __slots__ = ()

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        name = type(self).__name__
        raise TypeError(f"a {name} cannot be copied or pickled: it owns something of this process; pass it on as it is")
