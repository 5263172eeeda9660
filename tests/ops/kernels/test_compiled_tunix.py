"""What XLA makes for TPUs of Tunix's training step, unmodified, with splash attention in a `shard_map` of its own."""

import math
import re

import jax
import pytest

import autopar
from autopar import recipes
from autopar.execute.collectives import collectives, traffic
from autopar.verification import compile_for_target
from benchmarks.zoo.published.tunix_models import tunix_qwen3_splash

B, L, H, D = 8, 512, 2, 128


@pytest.mark.extra("tpu")
@pytest.mark.filterwarnings("ignore")  # that package's own
@pytest.mark.parametrize("recipe", [recipes.data_parallel(), recipes.zero(3), None], ids=["data", "zero 3", "free"])
def test_splash_attention_runs_on_each_devices_examples(recipe):
    pytest.importorskip("tunix")
    case = tunix_qwen3_splash(width=256, vocabulary=2048, length=L, split=8, interpreted=False)
    state = jax.eval_shape(case.init, jax.random.key(0))
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), case.batch(0))
    step = autopar.parallelize(case.step, plan=recipe, cluster="tpu-v5e:2x4", cache_dir=None)
    plan = step.plan(state, batch)
    text = compile_for_target(step, "tpu:v5e:2x4", state, batch).as_text()
    results = " ".join(re.findall(r"= (.*?) custom-call\(.*tpu_custom_call", text))
    shapes = [tuple(map(int, shape.split(","))) for shape in re.findall(r"\w+\[([\d,]+)\]", results)]
    assert max(math.prod(shape[:-2]) for shape in shapes if shape[-2:] == (L, D)) == B // 8 * H
    assert not re.findall(rf"\w+\[{B},{H},{L},{D}\]\S* all-gather", text), "no operand of attention is gathered"
    assert traffic(collectives(text)).total_bytes == pytest.approx(plan.predicted.sent_bytes, rel=0.1)
