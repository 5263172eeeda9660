"""Pipelines to emit: plain chains of stages, and random ones with everything that a compiler may ask for."""

import random

from autopar.runtime.program import Buffer, Pipeline, Task, TaskKind, Transfer
from autopar.runtime.schedule import PipelineSchedule

BEFORE, F, B, W, AFTER = TaskKind


class Builder:
    """Buffers, tasks and transfers with numbers as they come."""

    def __init__(self):
        self.buffers, self.tasks, self.transfers, self.inputs, self.outputs = [], [], [], [], []

    def buffer(self, name, mesh, *, nbytes=1, repeats=True):
        self.buffers.append(Buffer(name=name, mesh=mesh, nbytes=nbytes, repeats=repeats))
        return len(self.buffers) - 1

    def argument(self, name, mesh, nbytes=1):
        self.inputs.append(self.buffer(name, mesh, nbytes=nbytes, repeats=False))
        return self.inputs[-1]

    def task(self, name, stage, mesh, kind, inputs, outputs, donated=(), index=0):
        """`donated` are buffers here, not positions."""
        self.tasks.append(
            Task(
                name=name,
                stage=stage,
                mesh=mesh,
                kind=kind,
                inputs=tuple(inputs),
                outputs=tuple(outputs),
                donated=tuple(inputs.index(b) for b in donated),
                index=index,
            )
        )

    def on(self, buffer, mesh):
        """The buffer, or its copy on another mesh."""
        there = self.buffers[buffer]
        if there.mesh == mesh:
            return buffer
        for transfer in self.transfers:
            if transfer.source == buffer and self.buffers[transfer.target].mesh == mesh:
                return transfer.target
        copy = self.buffer(f"{there.name}@{mesh}", mesh, nbytes=there.nbytes, repeats=there.repeats)
        self.transfers.append(Transfer(source=buffer, target=copy, nbytes=there.nbytes))
        return copy

    def pipeline(self):
        return Pipeline(
            buffers=tuple(self.buffers),
            tasks=tuple(self.tasks),
            transfers=tuple(self.transfers),
            inputs=tuple(self.inputs),
            outputs=tuple(self.outputs),
        )


def chain(schedule: PipelineSchedule) -> Pipeline:
    """Stages in a row: activations forth, gradients back, weights updated at the end."""
    return random_pipeline(schedule, None)


def random_pipeline(schedule: PipelineSchedule, rng: random.Random | None) -> Pipeline:
    """A training step (or inference) for a schedule. With `rng` also: values that skip stages, forward to backward
    and back; stages without B or without weights; several tasks of a kind; buffers that nobody reads; donations;
    copies of copies; weights shared between stages; an argument that is a result; micro-batches split before and
    stacked after.
    """
    b, n = Builder(), schedule.num_stages

    def maybe(chance):
        return rng is not None and rng.random() < chance

    def size():
        return rng.randrange(1, 9) if rng else 1

    mesh = schedule.mesh_of_stage
    train = not schedule.forward_only
    weights = [b.argument(f"w{s}", mesh[s], size()) for s in range(n)]
    batch = b.argument("batch", mesh[0], size())
    if maybe(0.3):
        b.argument("unused", mesh[-1])
    parts = b.buffer("x", mesh[0], nbytes=size())
    b.task("split", 0, mesh[0], BEFORE, [batch], [parts], donated=[batch] if maybe(0.5) else [])
    sums = {}
    for s in range(n):
        if train and not maybe(0.2):
            sums[s] = b.buffer(f"dw{s}", mesh[s], repeats=False, nbytes=b.buffers[weights[s]].nbytes)
            b.task(f"zeros{s}", s, mesh[s], BEFORE, [], [sums[s]], index=1 if maybe(0.5) else 0)
    activations, saved, shared = [parts], [], []
    for s in range(n):
        there = [b.on(activations[-1], mesh[s]), weights[s]]
        if maybe(0.3):
            there.append(b.on(rng.choice(activations), mesh[s]))
        if maybe(0.2):
            shared.append(b.on(rng.choice(weights), mesh[s]))
            there.append(shared[-1])
        y = b.buffer(f"y{s}", mesh[s], nbytes=size())
        kept = b.buffer(f"saved{s}", mesh[s], nbytes=size())
        made = [y, kept]
        if maybe(0.2):
            made.append(b.buffer(f"wasted{s}", mesh[s], nbytes=size()))
        if maybe(0.3):
            half = b.buffer(f"half{s}", mesh[s], nbytes=size())
            b.task(f"F{s}a", s, mesh[s], F, there, [half])
            b.task(f"F{s}b", s, mesh[s], F, [half], made, donated=[half] if maybe(0.7) else [], index=1)
        else:
            b.task(f"F{s}", s, mesh[s], F, there, made)
        activations.append(y)
        saved.append(kept)
    if train:
        gradient = None
        gradients = []
        for s in reversed(range(n)):
            there = [saved[s], *([b.on(gradient, mesh[s])] if gradient is not None else [])]
            if maybe(0.3):
                there.append(b.on(rng.choice(activations), mesh[s]))
            if maybe(0.2) and gradients:
                there.append(b.on(rng.choice(gradients), mesh[s]))
            there = list(dict.fromkeys(there))
            if s == 0 and rng is not None and schedule.splits_backward and rng.random() < 0.5:
                if 0 in sums:
                    b.task("W0", 0, mesh[0], W, [*there, sums[0]], [sums[0]], donated=[sums[0]])
                continue
            gradient = b.buffer(f"g{s}", mesh[s], nbytes=size())
            gradients.append(gradient)
            update = [sums[s]] if s in sums else []
            if schedule.splits_backward:
                rest = b.buffer(f"rest{s}", mesh[s], nbytes=size())
                b.task(f"B{s}", s, mesh[s], B, there, [gradient, rest])
                if update:
                    b.task(f"W{s}", s, mesh[s], W, [rest, *update], update, donated=[rest, *update])
            else:
                b.task(f"B{s}", s, mesh[s], B, [*there, *update], [gradient, *update], donated=update)
        for s in range(n):
            if s in sums:
                new = b.buffer(f"new_w{s}", mesh[s], repeats=False)
                old = [weights[s], *([b.on(sums[rng.choice(list(sums))], mesh[s])] if maybe(0.3) else [])]
                there = list(dict.fromkeys([*old, sums[s]]))
                b.task(
                    f"update{s}",
                    s,
                    mesh[s],
                    AFTER,
                    there,
                    [new],
                    donated=[weights[s]] if weights[s] not in shared else [],
                )
                b.outputs.append(new)
            else:
                b.outputs.append(weights[s])
    result = b.buffer("result", mesh[-1], repeats=False)
    b.task("stack", n - 1, mesh[-1], AFTER, [activations[-1]], [result], index=1 if maybe(0.5) else 0)
    b.outputs.append(result)
    if maybe(0.3) and n > 1 and mesh[0] != mesh[-1]:
        back = b.on(result, mesh[0])
        b.outputs.append(back)
    return b.pipeline()
