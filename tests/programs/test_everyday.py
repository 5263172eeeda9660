"""Training steps as people write them, in the usual ways of running them, give what plain `jax.jit` gives."""

import functools
import json

import pytest

from benchmarks.everyday import MIXING, STEPS
from benchmarks.everyday.rows import append, load, page
from benchmarks.everyday.running import EQUAL, EXCUSED, FAILED, STAGES_WHOLE, WAYS, Bench, Job, Row, jobs_of, run

# fmt: off
WANTED = [
    "nanogpt", "llama", "gemma", "mixtral", "mamba", "rwkv", "t5", "whisper", "vit", "mae", "clip", "dino", "moco",
    "resnet", "unet_diffusion", "flow_matching", "gan", "vae", "vq_vae", "gnn", "dlrm", "nerf", "pinn", "deq",
    "neural_ode", "maml", "ppo", "grpo", "dpo", "dqn", "distillation", "lora", "qlora", "fp8",
    "llama_bf16_scan_remat", "linen_scan", "nnx_decoder", "equinox_mlp", "haiku_transformer", "muon", "soap",
    "schedule_free", "lbfgs", "multi_steps_ema", "own_accumulation", "packed", "bert_padded", "lstm_lengths",
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


@pytest.mark.parametrize(("name", "way"), [("vae", "zero(3)"), ("schedule_free", "two micro-batches")])
def test_a_fast_step_is_equal(name, way):
    bench = Bench(name)
    row = run(Job(step=name, way=way, devices=2), lambda *_: bench)
    assert row.kind == EQUAL, row


def test_a_step_of_other_numbers_is_wrong():
    """What is compared is compared: a result that is off by a ten-thousandth, and a whole number that is off by one."""
    bench = Bench("schedule_free")
    state, metrics = bench.expected[-1]
    assert bench.worst(bench.expected) == ""
    off = metrics | {"loss": metrics["loss"] * 1.0001}
    assert "['loss']: off by" in bench.worst([bench.expected[0], (state, off)])


def test_what_mixes_examples_is_excused_in_parts_alone():
    bench = Bench("gan")
    row = run(Job(step="gan", way="two micro-batches", devices=2), lambda *_: bench)
    assert row.kind == EXCUSED, row
    assert STAGES_WHOLE in [job.way for job in jobs_of("gan", 2, list(WAYS))]
    assert STAGES_WHOLE not in [job.way for job in jobs_of("vae", 2, list(WAYS))]


def test_rows_are_read_as_written(tmp_path):
    path, job = tmp_path / "rows.jsonl", Job(step="vae", way="zero(3)", devices=4)
    append(path, Row(job=job, kind="crash", said="KeyError: 3"))
    append(path, Row(job=job, kind="equal", processor_s=2.0))
    planned = Job(step="vae", cluster="dgx-h100:1", batch=13)
    append(path, Row(job=planned, kind="refused", said="MemoryLimitError: too large"))
    assert [json.loads(line)["kind"] for line in path.read_text().splitlines()] == ["crash", "equal", "refused"]
    rows = load(path)
    assert rows[job.key].kind == "equal"
    text = page(list(rows.values()))
    assert "- vae, refused (plan on dgx-h100:1 13): MemoryLimitError: too large" in text
    assert "KeyError" not in text
    assert "- zero(3) on 2: 50 of 50 (all)" in text
    (on_four,) = [line for line in text.splitlines() if line.startswith("- zero(3) on 4: 49 of 50")]
    assert "nanogpt, " in on_four
    assert "vae, " not in on_four.replace("vq_vae, ", "")


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS)
def test_every_step_on_four_devices(name):
    bench_of = functools.cache(Bench)
    for job in jobs_of(name, 4, list(WAYS)):
        row = run(job, bench_of)
        assert row.kind not in FAILED, row
