"""What tables of plans say of one."""

import autopar


def text_of(plan: autopar.Plan) -> str:
    """Stages as the search weighed them, or the mesh of one program."""
    if plan.record.pipeline is None:
        return f"mesh {plan.mesh}"
    same = [w.text for w in plan.record.weighed if w.step_time_s == plan.predicted.step_time_s]
    return same[0] if same else repr(plan)
