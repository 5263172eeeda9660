"""Devices, links and clusters: published constants, measured ones, and what a collective takes on them.

In: A preset's name, a file, or the devices of this program.
Out: `Cluster`, and seconds of a collective.
May import: common, ir.
"""
