"""The states in which a value of a graph can lie, beside its layout."""

from __future__ import annotations

# The states in which a value can lie, beside the copies for one role (by the role's name): as its operation left it,
# once its sums are reduced, and as a copy for readers of all roles; in the memory of the host, which nothing reads; and
# back from there.
UNREDUCED, REDUCED, ALL = "raw", "placed", "all"
HOST, RETURNED = "host", "back from the host"
