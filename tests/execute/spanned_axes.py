"""The mesh axes of a collective in a compiled program, from the numbers of its devices."""

from collections.abc import Mapping

from autopar.execute.collectives import Collective


def spanned_axes(collective: Collective, axis_sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The mesh axes along which the devices of a group differ.

    Args:
        axis_sizes: The mesh's axes in their order; its devices are numbered row by row, as XLA numbers partitions.
    """
    if collective.groups is None:
        return tuple(axis_sizes)
    varies = dict.fromkeys(axis_sizes, False)
    for group in collective.groups:
        for device in group[1:]:
            a, b = group[0], device
            for name, size in reversed(tuple(axis_sizes.items())):
                a, i = divmod(a, size)
                b, j = divmod(b, size)
                varies[name] |= i != j
    return tuple(name for name, differs in varies.items() if differs)
