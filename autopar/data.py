"""The examples of each process, by the plan at hand."""

from autopar.train.data.sharded import ShardedData, shard
from autopar.train.data.sources import TokenWindows, tokens

__all__ = ["ShardedData", "TokenWindows", "shard", "tokens"]
