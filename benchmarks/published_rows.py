"""Published step times of training runs: model, hardware, parallelism, and what was measured, as literal rows.

Sources, by table:
    megatron a100: Narayanan et al., "Efficient large-scale language model training on GPU clusters using Megatron-LM",
        2021, table 1 (full recomputation; micro-batches and interleaving from its scripts); Korthikanti et al.,
        "Reducing activation recomputation in large transformer models", 2022, table 5. Iteration times of the first are
        its sequences times the model's flops over its achieved rate. Vocabulary 51,200, 2,048 tokens.
    megatron-core h100: NVIDIA/Megatron-LM, README, table of model sizes (bfloat16, 4,096 tokens, vocabulary 131,072);
        the time is the model's flops by its own formula over the rate. The table gives no micro-batches: without stages
        all sequences of a copy are taken at once, for they fit, with stages one at a time. Nor does it give chunks;
        here they are as few as Megatron takes, which wants them to divide the layers of a group of devices: of 462B's
        seven layers, seven. By its text the 177B keeps 42 of 47 % where it has 12 micro-batches a step in place of 576,
        which three chunks of six stages or fewer would lose to their bubble alone: four, at least. Its runs
        gather parameters under the forward pass (--overlap-param-gather, --overlap-grad-reduce), and products of tensor
        parallelism send in place (--tp-comm-overlap: Transformer Engine's user buffers).
    torchtitan: pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md,
        asyncTP_llama3_h100_2025-06_torchtitan.md and llama3-8b_h200_202506_trainy-whitefiber.md; its H100s have 96 GB
        of HBM2e at 2.4 TB/s and 500 W. float8 is tensorwise, of the layers' products. Its selective recomputation
        computes every other product again, and what is no product nor attention; here every other layer is computed
        again. Tensor parallelism waits for its collectives, but where a row is called async, which sends
        pieces through PyTorch's symmetric memory.
    llama 3: Grattafiori et al., "The Llama 3 herd of models", 2024, table 4. Eight chunks of a stage: the 126 layers
        are one in each of 16 stages of 8 chunks, but for the first, which has the embedding alone, and the last, which
        has the output alone (there, section 3.3.2). Copies of the model share the optimizer's state and do not give
        gathered parameters back after the forward pass (ibid.). They share gradients too, which is not in the row:
        exchanged in each micro-batch (`zero=2`), these take longer than the published step.
    resnet-50: NVIDIA/DeepLearningExamples, TensorFlow/Classification/ConvNets/resnet50v1.5, README: float32 (on A100
        TF32) compiled by XLA, images per second. XLA lays float32 images out channel by channel (compiled for an A100,
        jaxlib 0.10.2), of which cuDNN of 2020 made copies for matrix units (MosaicML Composer, "Channels Last").
    maxtext: AI-Hypercomputer/maxtext, README (older revisions) and its scripts; the time is the flops of products and
        of whole attention, as it counts them, over the rate. What layers hand on lies split over the axis of tensor
        parallelism (activation_embed in MaxText/configs/base.yml), by width; here it is split by positions, which takes
        as much memory and sends as many bytes.
    megatron-bridge: NVIDIA-NeMo/Megatron-Bridge, docs/performance-summary-archive.md: all of its runs that train
        Llama 3 in 8 bits from the start, by release; the rate is in tokens a second of one card. Products of tensor
        parallelism send in place, parameters are gathered ahead, gradients are summed and reduced in 16 bits
        (grad_reduce_in_fp32=False), as its recipes of those releases (scripts/performance, tags v0.1.0rc4 to v0.5.0)
        have it, and the loss is Transformer Engine's (cross_entropy_fusion_impl). No layer is recomputed, but for five
        of 32 of the 8B on H100 from release 25.11 on (recompute_num_layers). Scales of float8 are those of the present
        operands ("FP8-CS") or of blocks ("MXFP8").
    mlperf v5.0: mlcommons/training_results_v5.0, configurations and the medians of logged step times of Llama 3.1 405B.
        Of 128 places for layers in 64 chunks the first and the last are the embedding's and the loss's. No layer is
        recomputed, scales of float8 are those of the step before, gradients are summed within products
        (gradient_accumulation_fusion) and reduced in 16 bits (grad_reduce_in_fp32=False), the loss is fused, and
        parameters are gathered in 8 bits under the forward pass (config_common.sh, conf/custom.yaml, pretrain.py).
    tpu-recipes: AI-Hypercomputer/tpu-recipes, training/trillium and training/ironwood, runs of MaxText. Weights are
        of 32 bits, but of 16 in 70B on 32 v6e (weight_dtype).
    gpu-recipes: AI-Hypercomputer/gpu-recipes, training/a4, runs of MaxText.

`SOURCES` has these in short. `LEFT_OUT` names published rows that are not here, with the reason.
"""

import dataclasses
from collections.abc import Callable, Collection

import autopar
from autopar.hardware import presets
from autopar.hardware.step_errors import ONE_PROGRAM, PIPELINE

SOURCES = {
    "megatron a100": "Narayanan et al., 2021, table 1; Korthikanti et al., 2022, table 5",
    "megatron-core h100": "NVIDIA/Megatron-LM, README",
    "torchtitan": "pytorch/torchtitan, benchmarks/llama3_h100_202412, asyncTP_llama3_h100_2025-06 and "
    "llama3-8b_h200_202506",
    "llama 3": "Grattafiori et al., 2024, table 4",
    "resnet-50": "NVIDIA/DeepLearningExamples, resnet50v1.5",
    "maxtext": "AI-Hypercomputer/maxtext, README",
    "megatron-bridge": "NVIDIA-NeMo/Megatron-Bridge@067f987df0, docs/performance-summary-archive.md",
    "mlperf v5.0": "mlcommons/training_results_v5.0@0fdc28f013, results of llama31_405b",
    "tpu-recipes": "AI-Hypercomputer/tpu-recipes@c8cfe2f689, training",
    "gpu-recipes": "AI-Hypercomputer/gpu-recipes@2e1fd5efbf, training/a4/llama3-1-70b",
}
# Tables of MaxText's runs, whose loss multiplies with labels of 0 and 1.
MAXTEXT_TABLES = ("maxtext", "tpu-recipes", "gpu-recipes")
# Published rows that are not in a table -> the reason.
LEFT_OUT = {
    "megatron-bridge: DeepSeek-V3 and V4 Flash, Kimi K2": "the zoo has no case with their latent attention.",
    "megatron-bridge: Qwen3 30B-A3B and 235B-A22B": "the zoo's case is Tunix's, which computes all experts for every "
    "token but on TPUs; the runs compute eight of 128.",
    "megatron-bridge: GPT-OSS 120B": "the zoo has no case with its windows, its sinks of attention and four experts of "
    "a token; one row has a regression that its source notes.",
    "megatron-bridge: Nemotron 3": "the zoo has no mixture of experts with state-space layers.",
    "megatron-bridge 26.02.01: Llama 3 70B in MXFP8 on 64 GB300": "its table has micro-batches of two and no chunks, "
    "the recipe of that release (tag v0.3.1) of one and five; by the table it needs 263 GB of 251.",
    "megatron-bridge: Llama 3 in NVFP4 (18 rows)": "the zoo's Llama has no products of four bits.",
    "megatron-bridge: fine-tuning of Llama 3 70B": "its sequences are packed, and their lengths are not published.",
    "primus: Qwen3 235B-A22B on 32 MI355X, stages of eight schedules, and Llama 2 7B on 8 MI300X, of six": "neither "
    "batches nor micro-batches are published (AMD-AGI/Primus@fd1eeabbad, docs_deprecated/tech_blogs/primus_pipeline).",
    "tpu-recipes: Llama 3.1 70B with 131,072 positions on 256 chips of TPU7x (2 rows)": "its split attention gathers "
    "keys and values, here they go round a ring; its layers keep all but two products, which no policy here does.",
    "tpu-recipes: Llama 2 70B on 256 v6e": "its log has two sequences a chip, its configuration three.",
    "tpu-recipes: Mixtral, DeepSeek-V3, Qwen3, GPT-OSS and Llama 4": "mixtures of experts that the zoo has no case of, "
    "or whose loads of experts are not published.",
    "tpu-recipes: Gemma 3 12B on 256 v6e": "five of six of its layers attend to a window, and the zoo's Llama attends "
    "to all positions in each layer.",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """Sizes. `family`: a case of the zoo, "gpt" (feed-forward of four widths), "llama" (gated), or "wide_resnet", whose
    `width` is the base, `length` the side of an image, and `vocabulary` the classes.
    """

    family: str
    layers: int
    width: int
    heads: int
    vocabulary: int
    length: int
    kv_heads: int = 0
    head: int = 0
    feed_forward: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """A row of a table. `batch` in sequences of all copies; `memory_gib` of the fullest device, where published.

    `recompute`: "nothing", "input" (all), "matmuls" (all but products), "input every n" (all of every nth layer), or
    "attention" (scores). `flash`: attention that keeps no scores. `compiled`: whether a compiler fused elementwise
    operations, as XLA does; eager rows are shown, and no constant is fitted to them. `waits_for_tensor`: collectives of
    tensor parallelism hold up computing; `waits_for_all`: all collectives do. `pieces`: where products of tensor
    parallelism send piece by piece while they run, how: by copies between devices, which no kernel and no channel of
    NCCL takes part in, "beside" the products' own copies of pieces, or "in place". `delayed_scales`: those of float8
    come from earlier steps, `block_scales` are those of blocks, and are predicted as those of whole operands.
    `half_gradients`: gradients, and their sums over micro-batches, are of `dtype`; else of 32 bits. `half_weights`:
    parameters and the optimizer's state are of `dtype`, too. `kept` and `in_host`: values of layers that are not
    recomputed, by MaxText's names for them (`benchmarks.zoo.llama`); the latter wait in the host's memory. Layers that
    have some are a scan. `fused_loss`: the loss keeps no 32 bits of each logit.
    `dropout`: the rate. `gather`: as of `recipes.combine`. `release`: of the run's software. `fitted`: a constant was
    fitted to the row, or may have been; all others are held out. `note`: how the run differs from the prediction, and
    the values that are not published.
    """

    table: str
    name: str
    release: str = ""
    model: Model
    hardware: str
    gpus: int
    batch: int
    micro_batch: int
    tp: int = 1
    pp: int = 1
    cp: int = 1
    zero: int = 0
    gather: str = "after"
    chunks: int = 1
    recompute: str = "nothing"
    sequence_parallel: bool = False
    dtype: str = "bfloat16"
    float8: bool = False
    delayed_scales: bool = False
    block_scales: bool = False
    half_gradients: bool = False
    half_weights: bool = False
    kept: tuple[str, ...] = ()
    in_host: tuple[str, ...] = ()
    fused_loss: bool = False
    dropout: float = 0.0
    flash: bool = True
    compiled: bool = True
    waits_for_tensor: bool = False
    pieces: str = ""
    waits_for_all: bool = False
    step_time_s: float
    memory_gib: float | None = None
    fitted: bool = False
    note: str = ""

    @property
    def key(self) -> str:
        return f"{self.table} {self.name}"

    @property
    def is_scan(self) -> bool:
        return bool(self.kept or self.in_host)

    @property
    def source(self) -> str:
        return SOURCES[self.table]

    @property
    def kind(self) -> str:
        """The kind of step, as of `hardware.step_errors`."""
        return PIPELINE if self.pp > 1 else ONE_PROGRAM

    @property
    def dp(self) -> int:
        return self.gpus // self.tp // self.pp // self.cp

    @property
    def num_microbatches(self) -> int:
        return self.batch // self.dp // self.micro_batch


# What 500 W leave in long runs, where 700 W leave 0.75 (`presets`): chosen on torchtitan's rows of up to two cards a
# sequence. `benchmarks.calibrate` says 0.65 from all of them, drawn down by the rings of four and eight.
SUSTAINED_AT_500_W = 0.70
# PyTorch runs FlashAttention-2 on them, which reaches 35 % of an H100's peak forward (Shah et al., "FlashAttention-3",
# 2024, abstract); backward FlashAttention-3 is 1.5 to 1.75 times as fast as it is (there, section 4.1), a third of the
# peak. Only NVIDIA's own builds of PyTorch, as on the H200s, choose cuDNN's kernel.
FLASH_ATTENTION_2 = ((128, 0.35, 0.33),)


def _titan_h100(gpus: int) -> autopar.Cluster:
    cluster = autopar.Cluster.preset("dgx-h100", hosts=gpus // 8)
    device = dataclasses.replace(
        presets.H100,
        memory_bytes=96_000_000_000,
        peak_memory_bytes_per_s=2.4e12,
        sustained_share=SUSTAINED_AT_500_W,
        attention_shares=FLASH_ATTENTION_2,
        source="torchtitan's H100s: 96 GB HBM2e at 2.4 TB/s, 500 W",
    )
    return dataclasses.replace(cluster, device=device)


def _gpus(name: str) -> Callable[[int], autopar.Cluster]:
    def of(gpus: int) -> autopar.Cluster:
        return (
            autopar.Cluster.preset(name, hosts=gpus // 8)
            if gpus >= 8
            else autopar.Cluster.preset(name).submesh(1, gpus)
        )

    return of


def _reordering(of: Callable[[int], autopar.Cluster]) -> Callable[[int], autopar.Cluster]:
    """Cards with the convolutions of cuDNN 8.0, which was inferred from these rows."""

    def clusters(gpus: int) -> autopar.Cluster:
        cluster = of(gpus)
        return dataclasses.replace(cluster, device=dataclasses.replace(cluster.device, reorders_convolutions=True))

    return clusters


def _racks(name: str) -> Callable[[int], autopar.Cluster]:
    """Of an NVL72 rack 16 hosts are used: no source names the number, and the runs' groups divide 64 cards."""

    def of(gpus: int) -> autopar.Cluster:
        hosts = gpus // 4
        return dataclasses.replace(autopar.Cluster.preset(name), num_hosts=hosts, hosts_per_domain=min(16, hosts))

    return of


def _tpus(name: str, topologies: dict[int, str]) -> Callable[[int], autopar.Cluster]:
    """By the number of devices, of one slice each, or of several as "2 of 16x16"."""

    def of(chips: int) -> autopar.Cluster:
        slices, _, topology = topologies[chips].rpartition(" of ")
        return autopar.Cluster.preset(name, topology=topology, hosts=int(slices or 1))

    return of


_V6E_SLICES = {8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16", 512: "2 of 16x16"}
# Hardware of rows -> the cluster of so many devices, and the kind whose constants it uses.
CLUSTERS: dict[str, tuple[Callable[[int], autopar.Cluster], str]] = {
    "V100": (_gpus("p3.16xlarge"), "V100"),
    "A100 40 GB": (_reordering(_gpus("dgx-a100-40g")), "A100 in TF32"),
    "A100": (_gpus("dgx-a100-80g"), "A100"),
    "H100": (_gpus("dgx-h100"), "H100"),
    "H100 96 GB": (_titan_h100, "H100 of 500 W"),
    "H200": (_gpus("dgx-h200"), "H100"),
    "TPU v5p": (_tpus("tpu-v5p", {64: "4x4x4", 128: "4x4x8"}), "TPU"),
    "TPU v5e": (_tpus("tpu-v5e", {256: "16x16"}), "TPU"),
    "TPU v6e": (_tpus("tpu-v6e", _V6E_SLICES), "TPU v6e"),
    "TPU7x": (_tpus("tpu7x", {128: "4x4x4", 512: "4x8x8"}), "TPU7x"),
    "B200": (_gpus("dgx-b200"), "B200"),
    "GB200": (_racks("gb200-nvl72"), "B200"),
    "GB300": (_racks("gb300-nvl72"), "GB300"),
}


def megatron_flops(model: Model, batch: int) -> float:
    """Of a step without recomputation, as Megatron-LM counts (Narayanan et al., 2021, equation 3, three passes)."""
    b, s, n, h = batch, model.length, model.layers, model.width
    return 72.0 * b * s * n * h**2 * (1 + s / (6 * h) + model.vocabulary / (12 * n * h))


def llama_flops(model: Model, batch: int) -> float:
    """Six for each weight of a product and token, and 12 s h of whole attention in each layer and token: as MaxText's
    older revisions count, and Chowdhery et al., "PaLM", 2022, appendix B.
    """
    head = model.head or model.width // model.heads
    attention = 2 * model.width * head * (model.heads + model.kv_heads)
    weights = model.layers * (attention + 3 * model.width * model.feed_forward) + model.vocabulary * model.width
    return batch * model.length * (6.0 * weights + 12.0 * model.layers * model.length * model.heads * head)


def _gpt(layers: int, width: int, heads: int, *, vocabulary: int = 51_200, length: int = 2048) -> Model:
    return Model(family="gpt", layers=layers, width=width, heads=heads, vocabulary=vocabulary, length=length)


# Megatron-LM of 2021 and 2022 runs the all-reduces of tensor parallelism in the stream of its kernels, and those of
# gradients after the last backward pass. Activations and probabilities are dropped at a rate of 0.1 (its default, and
# the masks of Korthikanti et al., 2022, section 4.1). Its elementwise kernels are fused as XLA would (Narayanan et al.,
# 2021, section 4.2).
def _megatron(name: str, model: Model, gpus: int, batch: int, micro_batch: int, seconds: float, **how) -> Row:
    how = {"recompute": "input", "dtype": "float16", "flash": False, "dropout": 0.1, "waits_for_all": True, **how}
    return Row(
        table="megatron a100", name=name, model=model, hardware="A100", gpus=gpus, batch=batch,
        micro_batch=micro_batch, step_time_s=seconds, fitted=True, **how,
    )  # fmt: skip


_SELECTIVE = {"recompute": "attention", "sequence_parallel": True}
MEGATRON_A100 = (
    _megatron("1.7B", _gpt(24, 2304, 24), 32, 512, 16, 3.528),
    _megatron("7.5B", _gpt(36, 4096, 32), 128, 512, 16, 3.696, tp=4),
    _megatron("39.1B", _gpt(48, 8192, 64), 512, 1536, 4, 14.453, tp=8, pp=2),
    _megatron("145.6B", _gpt(80, 12_288, 96), 1536, 2304, 2, 24.817, tp=8, pp=8, chunks=2),
    _megatron("529.6B", _gpt(105, 20_480, 128), 2520, 2520, 1, 54.085, tp=8, pp=35, chunks=3),
    _megatron("22B", _gpt(48, 6144, 64), 8, 4, 4, 1.42, tp=8),
    _megatron("22B selective", _gpt(48, 6144, 64), 8, 4, 4, 1.10, tp=8, **_SELECTIVE),
    _megatron("530B", _gpt(105, 20_480, 128), 280, 280, 1, 49.05, tp=8, pp=35, chunks=3),
    _megatron("530B selective", _gpt(105, 20_480, 128), 280, 280, 1, 37.83, tp=8, pp=35, chunks=3, **_SELECTIVE),
)


def _megatron_core(
    name: str, sizes: tuple[int, int, int], parts: tuple[int, int], gpus: int, batch: int, tflops: float,
    least_chunks: int = 2,
) -> Row:  # fmt: skip
    model, (tp, pp) = _gpt(*sizes, vocabulary=131_072, length=4096), parts
    of_group = model.layers // pp
    return Row(
        table="megatron-core h100", name=name, model=model, hardware="H100", gpus=gpus, batch=batch,
        micro_batch=1 if pp > 1 else batch * tp // gpus,
        tp=tp, pp=pp, zero=1, gather="ahead", sequence_parallel=tp > 1, pieces="in place" if tp > 1 else "",
        chunks=1 if pp == 1 else next(n for n in range(least_chunks, of_group + 1) if of_group % n == 0),
        step_time_s=megatron_flops(model, batch) / (tflops * 1e12 * gpus), fitted=True,
    )  # fmt: skip


MEGATRON_CORE_H100 = (
    _megatron_core("1.7B", (24, 2048, 16), (1, 1), 48, 192, 408.8),
    _megatron_core("16B", (32, 6144, 48), (4, 1), 192, 192, 489.1),
    _megatron_core("70B", (84, 8192, 64), (8, 2), 768, 384, 419.7),
    _megatron_core("177B", (96, 12_288, 96), (8, 6), 2304, 1152, 432.8, least_chunks=4),
    _megatron_core("462B", (112, 18_432, 144), (8, 16), 6144, 3072, 459.9),
)

_LLAMA = {
    "8B": (32, 4096, 32, 14_336),
    "70B": (80, 8192, 64, 28_672),
    "405B": (126, 16_384, 128, 53_248),
}


def _llama(size: str, length: int) -> Model:
    layers, width, heads, feed_forward = _LLAMA[size]
    return Model(
        family="llama", layers=layers, width=width, heads=heads, kv_heads=8, feed_forward=feed_forward,
        vocabulary=128_256, length=length,
    )  # fmt: skip


def _titan(
    size: str, fsdp: int, local_batch: int, tokens_per_s: float, memory_gib: float | None = None, *, tp: int = 1,
    pp: int = 1, cp: int = 1, length: int = 8192, full: bool = False, waits: bool = True, hardware: str = "H100 96 GB",
    **how,
) -> Row:  # fmt: skip
    """`tokens_per_s` of one device. `waits`: of tensor parallelism. There are as many micro-batches as stages, which is
    torchtitan's default (`pipeline_parallel_microbatches`).
    """
    gpus, batch = fsdp * tp * pp * cp, fsdp * local_batch
    parts = "".join(f" {what}{n}" for what, n in (("tp", tp), ("pp", pp), ("cp", cp)) if n > 1)
    precision = " float8" if how.get("float8") else "" if how.get("compiled", True) else " eager"
    context = (f" {length // 1024}k" if length != 8192 else "") + (" async" if tp > 1 and pp == 1 and not waits else "")
    return Row(
        table="torchtitan", name=f"{size} on {gpus} {hardware[:4]}{parts}{context}{precision}",
        model=_llama(size, length), hardware=hardware, gpus=gpus, batch=batch,
        micro_batch=max(1, local_batch // pp), tp=tp, pp=pp, cp=cp, zero=3 if pp == 1 else 1,
        sequence_parallel=tp > 1, recompute="input" if full else "input every 2", memory_gib=memory_gib,
        waits_for_tensor=tp > 1 and waits, pieces="beside" if tp > 1 and not waits else "",
        step_time_s=batch * length / (tokens_per_s * gpus), fitted=how.get("compiled", True),
        note="" if how.get("compiled", True) else "an eager run, predicted as compiled", **how,
    )  # fmt: skip


TORCHTITAN = (
    _titan("8B", 8, 2, 5762, 82.4, compiled=False),
    _titan("8B", 8, 2, 6667, 77.0),
    _titan("8B", 8, 2, 8532, 76.8, float8=True),
    _titan("8B", 8, 1, 3890, 83.9, length=32_768, full=True, float8=True),
    _titan("8B", 4, 1, 2540, 84.2, cp=2, length=65_536, full=True, float8=True),
    _titan("8B", 2, 1, 1071, 84.0, cp=4, length=131_072, full=True, float8=True),
    _titan("8B", 1, 1, 548, 84.5, cp=8, length=262_144, full=True, float8=True),
    _titan("8B", 128, 2, 6514, 62.0),
    _titan("8B", 128, 2, 8380, 61.8, float8=True),
    _titan("70B", 32, 16, 829, 71.9, tp=8, full=True, float8=True),
    _titan("70B", 32, 16, 876, 67.6, tp=8, full=True, float8=True, waits=False),
    _titan("405B", 8, 32, 100, 82.5, tp=8, pp=8, full=True, float8=True, waits=False),
    _titan("405B", 8, 8, 76, 75.3, tp=8, pp=8, length=32_768, full=True, float8=True, waits=False),
    _titan("405B", 2, 8, 31, 77.1, tp=8, pp=8, cp=4, length=131_072, full=True, float8=True, waits=False),
    _titan("70B", 32, 16, 597.3, tp=8, full=True),
    _titan("8B", 8, 12, 4378, tp=8),
    _titan("8B", 8, 12, 5078.1, tp=8, float8=True),
    _titan("8B", 32, 2, 10_938, 47.96, hardware="H200", float8=True),
)
LLAMA3 = (
    Row(
        table="llama 3", name="405B on 8192 H100", model=_llama("405B", 8192), hardware="H100", gpus=8192, batch=2048,
        micro_batch=1, tp=8, pp=16, zero=1, gather="ahead", chunks=8, sequence_parallel=True,
        step_time_s=llama_flops(_llama("405B", 8192), 2048) / (430e12 * 8192), fitted=True,
    ),
)  # fmt: skip

# layers, width, heads, feed-forward; heads have 128 numbers.
_MAXTEXT = {
    "16B": (32, 4096, 64, 28_672),
    "32B": (32, 8192, 64, 28_672),
    "64B": (64, 8192, 64, 28_672),
    "128B": (64, 8192, 128, 57_344),
}


def _maxtext(size: str, kind: str, chips: int, of_chip: int, tflops: float, *, tp: int = 1, full: bool) -> Row:
    layers, width, heads, feed_forward = _MAXTEXT[size]
    model = Model(
        family="llama", layers=layers, width=width, heads=heads, kv_heads=heads, head=128, feed_forward=feed_forward,
        vocabulary=32_000, length=2048,
    )  # fmt: skip
    batch = of_chip * chips
    return Row(
        table="maxtext", name=f"{size} on {chips} {kind}", model=model, hardware=f"TPU {kind}", gpus=chips, batch=batch,
        micro_batch=of_chip * tp, tp=tp, zero=3, sequence_parallel=tp > 1, recompute="input" if full else "matmuls",
        step_time_s=llama_flops(model, batch) / (tflops * 1e12 * chips), fitted=True,
    )  # fmt: skip


MAXTEXT = (
    _maxtext("32B", "v5p", 64, 6, 328.0, tp=4, full=False),
    _maxtext("128B", "v5p", 128, 1, 315.0, tp=8, full=False),
    _maxtext("16B", "v5e", 256, 6, 120.0, full=True),
    _maxtext("64B", "v5e", 256, 2, 118.0, full=True),
)  # fmt: skip


def _resnet(hardware: str, gpus: int, of_each: int, images_per_s: float) -> Row:
    model = Model(family="wide_resnet", layers=50, width=64, heads=1, vocabulary=1000, length=224)
    return Row(
        table="resnet-50", name=f"{gpus} {hardware}", model=model, hardware=hardware, gpus=gpus, batch=of_each * gpus,
        micro_batch=of_each, dtype="float32", flash=False, step_time_s=of_each * gpus / images_per_s,
        fitted=hardware.startswith("A100"),  # `reorders_convolutions`
    )  # fmt: skip


RESNET_50 = (
    _resnet("V100", 1, 128, 412),
    _resnet("V100", 8, 128, 3170),
    _resnet("A100 40 GB", 1, 256, 909),
    _resnet("A100 40 GB", 8, 256, 7000),
)


def _rack_note(hardware: str) -> str:
    return "the cards used of each rack are not published: 64" if hardware.startswith("GB") else ""


def _bridge(
    size: str, hardware: str, gpus: int, batch: int, micro_batch: int, tokens_per_s: dict[str, float], *,
    scales: str = "FP8", fitted: Collection[str] = (), notes: dict[str, str] | None = None, **how,
) -> tuple[Row, ...]:  # fmt: skip
    """The same run under several releases, with the tokens that one device read a second under each. `notes`: by
    release, where a run has one.
    """
    parts = "".join(f" {what}{how[what]}" for what in ("tp", "pp", "cp") if what in how)
    model, is_sharded = _llama(size, 8192), how.get("zero") == 3
    defaults = {
        "zero": 1, "gather": "after" if is_sharded else "ahead", "sequence_parallel": "tp" in how,
        "pieces": "in place" if "tp" in how else "",
    }  # fmt: skip
    return tuple(
        Row(
            table="megatron-bridge", name=f"{release} {size} on {gpus} {hardware}{parts} {scales}", release=release,
            model=model, hardware=hardware, gpus=gpus, batch=batch, micro_batch=micro_batch, float8=True,
            block_scales=scales == "MXFP8", half_gradients=True, fused_loss=True,
            step_time_s=batch * model.length / (rate * gpus), fitted=release in fitted,
            note="; ".join(filter(None, ((notes or {}).get(release), _SCALES[scales], _rack_note(hardware)))),
            **defaults | how,
        )
        for release, rate in tokens_per_s.items()
    )  # fmt: skip


# MXFP8's are those of blocks of 32 numbers.
_SCALES = {"FP8": "", "MXFP8": "scales of blocks, here of whole operands"}


def _in_host(releases: Collection[str], layers: int) -> dict[str, str]:
    text = f"the run keeps activations of {layers} layers in the host's memory, here all stay on the device"
    return dict.fromkeys(releases, text)


_GB200_70B = {"25.11": 4312, "26.02": 4040, "26.02.01": 4357, "26.04": 4143, "26.04.01": 4224}
_GB300_70B = {"25.11": 4520, "26.02": 5003, "26.02.01": 5243, "26.04": 5243, "26.04.01": 5248}
MEGATRON_BRIDGE = (
    *_bridge("8B", "H100", 8, 128, 1, {"25.09": 14_079}, zero=3),
    *_bridge("8B", "H100", 8, 128, 1, {"25.11": 14_451}, zero=3, recompute="input every 6"),
    *_bridge("8B", "B200", 8, 128, 2, {"25.09": 29_994, "25.11": 30_624}, fitted=("25.11",)),
    *_bridge("8B", "B200", 8, 128, 2, {"25.09": 29_388, "25.11": 29_521}, scales="MXFP8"),
    *_bridge("8B", "GB200", 8, 128, 2, {"25.09": 31_357, "25.11": 31_508}, fitted=("25.11",)),
    *_bridge("8B", "GB200", 8, 128, 2, {"25.09": 29_925, "25.11": 29_789}, scales="MXFP8"),
    *_bridge("8B", "GB300", 8, 128, 2, {"25.11": 37_556}, fitted=("25.11",)),
    *_bridge("8B", "GB300", 8, 128, 2, {"25.11": 36_108}, scales="MXFP8"),
    *_bridge("70B", "H100", 64, 128, 1, {"25.09": 1619, "25.11": 1602}, tp=4, pp=8, chunks=5),
    *_bridge(
        "70B", "H100", 64, 256, 1, {"26.02": 1621, "26.02.01": 1639, "26.04": 1633, "26.04.01": 1664},
        tp=4, pp=8, chunks=5,
    ),
    *_bridge("70B", "GB200", 64, 128, 2, {"25.09": 3986}, zero=3, notes=_in_host(("25.09",), 40)),
    *_bridge("70B", "GB200", 64, 256, 2, _GB200_70B, zero=3, notes=_in_host(_GB200_70B, 40)),
    *_bridge("70B", "GB200", 64, 128, 1, {"25.09": 3546}, tp=2, pp=4, chunks=5, scales="MXFP8"),
    *_bridge(
        "70B", "GB200", 64, 256, 1, {"26.02": 3613, "26.02.01": 3837, "26.04": 3828, "26.04.01": 3712},
        tp=2, pp=4, chunks=5, scales="MXFP8",
    ),
    *_bridge("70B", "GB300", 64, 256, 2, _GB300_70B, zero=3, fitted=("26.04.01",), notes=_in_host(_GB300_70B, 20)),
    *_bridge(
        "70B", "GB300", 64, 256, 1, {"26.02": 4596, "26.04": 4742, "26.04.01": 4864}, pp=4, chunks=5, scales="MXFP8"
    ),
    *_bridge("405B", "H100", 1024, 512, 1, {"25.09": 302, "25.11": 292}, tp=8, pp=8, cp=2, chunks=8),
    *_bridge("405B", "H100", 1024, 1536, 1, {"26.02": 311, "26.04.01": 328, "26.06": 326}, tp=8, pp=8, cp=2, chunks=8),
    *_bridge("405B", "B200", 128, 64, 1, {"25.09": 664, "25.11": 661}, tp=4, pp=8, cp=2, chunks=8),
    *_bridge("405B", "B200", 128, 64, 1, {"25.09": 622, "25.11": 624}, tp=4, pp=8, cp=2, chunks=8, scales="MXFP8"),
    *_bridge("405B", "GB200", 128, 64, 1, {"25.09": 729}, tp=2, zero=3, notes=_in_host(("25.09",), 95)),
    *_bridge("405B", "GB200", 128, 64, 1, {"25.09": 578}, tp=4, pp=8, cp=2, chunks=8, scales="MXFP8"),
    *_bridge(
        "405B", "GB200", 256, 1536, 1,
        {"25.11": 813, "26.02": 793, "26.02.01": 818, "26.04": 842, "26.04.01": 864, "26.06": 843},
        tp=4, pp=16, chunks=4,
    ),
    *_bridge(
        "405B", "GB200", 256, 1536, 1, {"26.02": 786, "26.02.01": 775, "26.04": 793, "26.04.01": 800, "26.06": 783},
        tp=4, pp=16, chunks=8, scales="MXFP8",
    ),
    *_bridge("405B", "GB300", 256, 1536, 1, {"25.11": 999, "26.02.01": 1024}, tp=2, pp=8, cp=2, chunks=4),
    *_bridge(
        "405B", "GB300", 256, 1536, 1, {"26.02": 988, "26.04": 1036, "26.04.01": 1024, "26.06": 1048},
        tp=4, pp=8, chunks=4,
    ),
    *_bridge(
        "405B", "GB300", 256, 1536, 1, {"26.02": 931, "26.02.01": 949, "26.04": 968, "26.04.01": 960, "26.06": 952},
        tp=2, pp=8, cp=2, chunks=4, scales="MXFP8",
    ),
)  # fmt: skip


def _mlperf(hardware: str, gpus: int, batch: int, seconds: float, tp: int) -> Row:
    return Row(
        table="mlperf v5.0", name=f"405B on {gpus} {hardware} tp{tp} pp8 cp2", model=_llama("405B", 8192),
        hardware=hardware, gpus=gpus, batch=batch, micro_batch=1, tp=tp, pp=8, cp=2, chunks=8, zero=1, gather="ahead",
        sequence_parallel=True, pieces="in place", float8=True, delayed_scales=True, half_gradients=True,
        fused_loss=True,
        step_time_s=seconds,
        note="; ".join(filter(None, ("attention is taken to run in 16 bits", _rack_note(hardware)))),
    )  # fmt: skip


MLPERF = (
    _mlperf("H100", 512, 1152, 55.102, 8),
    _mlperf("H100", 2048, 1152, 14.207, 8),
    _mlperf("H100", 8192, 1536, 5.182, 8),
    _mlperf("GB200", 1024, 768, 8.448, 4),
    _mlperf("GB200", 2048, 1280, 7.152, 4),
)


# Of v6e and of TPU7x two rows, one of each size, to which a constant is fitted.
V6E_FITTED = (("8B", 8), ("70B", 32))
TPU7X_FITTED = (("70B", 64, False), ("405B", 256, False))
_MISTRAL_7B = dataclasses.replace(_llama("8B", 8192), vocabulary=32_000)
# Values of layers by MaxText's names.
_INPUTS, _QKV = ("decoder_layer_input",), ("query_proj", "key_proj", "value_proj")


def _trillium(size: str, chips: int, of_chip: int, seconds: float, model: Model | None = None, **how) -> Row:
    defaults = {"in_host": _INPUTS + _QKV, "fitted": (size, chips) in V6E_FITTED}
    return Row(
        table="tpu-recipes", name=f"{size} on {chips} v6e", model=model or _llama(size, 8192), hardware="TPU v6e",
        gpus=chips, batch=of_chip * chips, micro_batch=of_chip, zero=3, recompute="input", step_time_s=seconds,
        **defaults | how,
    )  # fmt: skip


def _ironwood(size: str, chips: int, of_device: int, float8: bool, seconds: float, **how) -> Row:
    """Each chip is two devices."""
    return Row(
        table="tpu-recipes", name=f"{size} on {chips} chips of TPU7x{' float8' if float8 else ''}",
        model=_llama(size, 8192), hardware="TPU7x", gpus=2 * chips, batch=of_device * 2 * chips,
        micro_batch=of_device, zero=3, recompute="input", float8=float8, step_time_s=seconds,
        fitted=(size, chips, float8) in TPU7X_FITTED, **how,
    )  # fmt: skip


_OUT_IN_HOST = {"in_host": (*_INPUTS, *_QKV, "out_proj")}
_KEPT_70B = {"kept": (*_INPUTS, *_QKV)}
TPU_RECIPES = (
    _trillium("8B", 8, 3, 3.443, **_OUT_IN_HOST),
    _trillium("8B", 16, 3, 3.393, **_OUT_IN_HOST),
    _trillium("8B", 32, 3, 3.495, **_OUT_IN_HOST),
    _trillium("8B", 64, 5, 5.652, **_OUT_IN_HOST),
    _trillium("8B", 128, 4, 4.602, **_OUT_IN_HOST),
    _trillium("8B", 256, 4, 4.546, **_OUT_IN_HOST),
    _trillium("70B", 32, 2, 17.790, half_weights=True),
    _trillium("70B", 64, 2, 18.688),
    _trillium("70B", 128, 4, 34.786),
    _trillium("70B", 256, 5, 42.656),
    _trillium("Mistral 7B", 8, 6, 6.320, _MISTRAL_7B, **_OUT_IN_HOST),
    _trillium("405B", 512, 1, 54.803, in_host=_INPUTS),
    _ironwood("70B", 64, 2, False, 12.20, **_KEPT_70B),
    _ironwood("70B", 64, 2, True, 7.93, **_KEPT_70B),
    _ironwood("70B", 256, 2, False, 12.27, **_KEPT_70B),
    _ironwood("70B", 256, 2, True, 7.95, **_KEPT_70B),
    _ironwood("405B", 256, 3, False, 98.34, kept=("key_proj", "value_proj"), in_host=(*_INPUTS, "mlpwo")),
    _ironwood("405B", 256, 3, True, 64.37, in_host=_INPUTS),
)  # fmt: skip
GPU_RECIPES = (
    Row(
        table="gpu-recipes", name="70B on 256 B200 float8", model=_llama("70B", 8192), hardware="B200", gpus=256,
        batch=2048, micro_batch=8, zero=3, recompute="input", float8=True, step_time_s=20.935,
    ),
)  # fmt: skip

ROWS = {
    row.key: row
    for table in (
        MEGATRON_A100,
        MEGATRON_CORE_H100,
        TORCHTITAN,
        LLAMA3,
        MAXTEXT,
        RESNET_50,
        MEGATRON_BRIDGE,
        MLPERF,
        TPU_RECIPES,
        GPU_RECIPES,
    )
    for row in table
}
