"""The best pipeline under tensor parallelism inside of hosts, with products in pieces, as Megatron-Core has its stages.

The decisions of the tables price what a product gathers whole, and so seldom gather it: whether pieces of it hide is
known once a pipeline is simulated.
"""

from __future__ import annotations

from autopar.cost.cost_model import cost_model
from autopar.errors import InvalidArgumentError
from autopar.inter_op.evaluate import PipelineEvaluator
from autopar.plan.rivals import TENSOR_PARALLEL, tensor_group
from autopar.sharding.binding import Binding
from autopar.sharding.head_groups import splits_heads, with_heads
from autopar.sharding.parallelisms import data_axis, tensor_axis


def refine_with_tensor_parallelism(builder: PipelineEvaluator) -> None:
    """Evaluates the best pipeline of several stages of one size again, with positions in parts between the matrices of
    a tensor group and ZeRO-1 over the other devices of a stage, where such groups make up the stages.
    """
    best, group = builder.best_of_several_stages, tensor_group(builder.cluster)
    sizes = {mesh.num_devices for mesh in best.choice.group_meshes} if best is not None else set()
    if best is None or best is not builder.best or len(sizes) != 1 or group == 1:
        return
    (size,) = sizes
    mesh = best.choice.group_meshes[0]
    if size % group or not cost_model(builder.cluster, mesh).overlap.kinds:
        return
    axes = data_axis(1), tensor_axis(sequence_parallel=True, collective_matmul=True)
    binding = Binding(axes=axes, sizes=(None, group))
    graph = builder.cuts[best.num_microbatches].annotated.graph
    try:
        binding.check(graph, size)
    except InvalidArgumentError:  # there are no matrices to split
        return
    if splits_heads(binding):
        binding = with_heads(binding, graph)
    builder.refined(best.num_microbatches, best.choice, f"{TENSOR_PARALLEL} over {group}", binding)
