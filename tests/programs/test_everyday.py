"""Training steps as people write them, in the usual ways of running them, give what plain `jax.jit` gives."""

import functools

import pytest

from benchmarks.everyday import MIXING, STEPS
from benchmarks.everyday.running import EQUAL, EXCUSED, FAILED, STAGES_WHOLE, Bench, Job, jobs_of, run

# fmt: off
WANTED = [
    "nanogpt", "llama", "gemma", "mixtral", "mamba", "rwkv", "t5", "encoder_decoder", "vit", "mae", "clip", "dino",
    "moco", "resnet", "unet", "flow_matching", "gan", "vae", "vq_vae", "gnn", "dlrm", "nerf", "pinn", "fixed_point",
    "neural_ode", "maml", "ppo", "grpo", "dpo", "dqn", "distillation", "lora", "qlora", "fp8",
    "llama_bf16_scan_remat", "linen_scan", "nnx_decoder", "equinox_mlp", "haiku_transformer", "muon", "soap",
    "schedule_free", "lbfgs", "multi_steps_ema", "own_accumulation", "packed", "bert", "lstm_lengths",
    "chunked_vocabulary", "wgan_gp",
]
# fmt: on


def test_there_are_fifty_steps():
    assert sorted(STEPS) == sorted(WANTED)
    assert len(STEPS) == 50
    assert set(MIXING) < set(STEPS)
    for name, make in STEPS.items():
        assert make(8).name == name


def test_batches_are_of_the_size_asked_for():
    for name, make in STEPS.items():
        sizes = [{key: leaf.shape for key, leaf in make(size).batch(0).items()} for size in (3, 8)]
        assert sizes[0].keys() == sizes[1].keys()
        assert all(sizes[0][key] != sizes[1][key] for key in sizes[0]), name


@pytest.mark.cases(1)
@pytest.mark.parametrize(("name", "way"), [("vae", "zero(3)"), ("schedule_free", "two micro-batches")])
def test_a_fast_step_is_equal(name, way):
    bench = Bench(name)
    found = run(Job(step=name, way=way, devices=2), lambda *_: bench)
    assert found.kind == EQUAL, found


def test_a_step_of_other_numbers_is_wrong():
    """What is compared is compared: a result that is off by a ten-thousandth, and a whole number that is off by one."""
    bench = Bench("schedule_free")
    state, metrics = bench.expected[-1]
    assert bench.worst(bench.expected) == ""
    off = metrics | {"loss": metrics["loss"] * 1.0001}
    assert "['loss']: off by" in bench.worst([bench.expected[0], (state, off)])


def test_what_mixes_examples_is_excused_in_parts_alone():
    bench = Bench("gan")
    found = run(Job(step="gan", way="two micro-batches", devices=2), lambda *_: bench)
    assert found.kind == EXCUSED, found
    assert STAGES_WHOLE in [job.way for job in jobs_of("gan", 2)]
    assert STAGES_WHOLE not in [job.way for job in jobs_of("vae", 2)]


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.parametrize("name", STEPS)
def test_every_step_in_every_way(name, devices):
    bench_of = functools.cache(Bench)
    for job in jobs_of(name, devices):
        found = run(job, bench_of)
        assert found.kind not in FAILED, found
