"""Devices, links and clusters: published constants, measured constants, the cost of a collective.

In: The name of a preset, a file, or the devices of this program.
Out: `Cluster` with its `DeviceKind` and `Link`s; seconds and bytes of a collective; the interval of a step time.
May import: common.
"""
