"""The models that plans are compared on: cases of the zoo with their sizes, named by family and size."""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
import optax

from autopar.hardware.cluster import Cluster
from benchmarks.zoo import CASES
from benchmarks.zoo.case import Case

ADAM = optax.adamw(1e-4)
ALPA_MOMENTUM = optax.sgd(0.1, momentum=0.9, nesterov=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """A case with its sizes.

    `parameters` as published, None where nobody published the size; `gpus` those of Alpa's weak scaling.
    """

    family: str
    size: str
    case: str
    sizes: dict[str, Any]
    parameters: float | None = None
    gpus: int | None = None

    @property
    def name(self) -> str:
        return f"{self.family}-{self.size}"

    def build(self) -> Case:
        return CASES[self.case](**self.sizes)

    def shapes(self) -> tuple[Any, Any]:
        """(state, batch) as shapes."""
        return self.build().shapes()


def cluster_of(text: str) -> Cluster:
    """As `Cluster.parse`, and `p3.16xlarge/4`: four devices of one host."""
    name, _, devices = text.partition("/")
    cluster = Cluster.parse(name)
    return cluster.submesh(1, int(devices)) if devices else cluster


GPT_BATCH, VOCABULARY = 1024, 51_200
GPT_SIZES = {  # name -> layers, width, heads, GPUs
    # Brown et al., "Language models are few-shot learners", 2020, table 2.1.
    "125M": (12, 768, 12, None),
    # Alpa (Zheng et al., OSDI 2022), table 5; 15B has 40 heads in Alpa's repository.
    "350M": (24, 1024, 16, 1),
    "1.3B": (24, 2048, 32, 4),
    "2.6B": (32, 2560, 32, 8),
    "6.7B": (32, 4096, 32, 16),
    "15B": (48, 5120, 40, 32),
    "39B": (48, 8192, 64, 64),
    "175B": (96, 12_288, 96, None),
}
MOE_SIZES = {  # Alpa, table 6; 27B and 70B have 16 heads in its repository. Name -> layers, width, heads, experts, GPUs
    "380M": (8, 768, 16, 8, 1),
    "1.3B": (16, 768, 16, 16, 4),
    "2.4B": (16, 1024, 16, 16, 8),
    "10B": (16, 1536, 16, 32, 16),
    "27B": (16, 2048, 16, 48, 32),
    "70B": (32, 2048, 16, 64, 64),
}
WIDE_RESNET_SIZES = {  # Alpa, table 7. Name -> layers, base channels, width factor, GPUs
    "250M": (50, 160, 2, 1),
    "1B": (50, 320, 2, 4),
    "2B": (50, 448, 2, 8),
    "4B": (50, 640, 2, 16),
    "6.8B": (50, 320, 16, 32),
    "13B": (101, 320, 16, 64),
}


def gpt(size: str, layers: int, width: int, heads: int, gpus: int | None, **others: Any) -> Model:
    sizes = dict(layers=layers, width=width, heads=heads, vocabulary=VOCABULARY, length=1024, batch=GPT_BATCH)
    return _model("gpt", size, "gpt", sizes | dict(dtype=jnp.float16, optimizer=ADAM) | others, gpus)


def moe(size: str, layers: int, width: int, heads: int, experts: int, gpus: int, **others: Any) -> Model:
    sizes = dict(layers=layers, width=width, heads=heads, experts=experts, vocabulary=32_000, length=1024)
    sizes |= dict(batch=GPT_BATCH, dtype=jnp.float16, optimizer=ADAM)
    return _model("moe", size, "gshard_moe", sizes | others, gpus)


def wide_resnet(size: str, layers: int, base: int, width_factor: int, gpus: int, batch: int = 1536) -> Model:
    sizes = dict(layers=layers, base=base, width_factor=width_factor, image=224, classes=1024, batch=batch)
    return _model("wide-resnet", size, "wide_resnet", sizes | dict(optimizer=ALPA_MOMENTUM), gpus)


def _model(family: str, size: str, case: str, sizes: dict[str, Any], gpus: int | None = None) -> Model:
    """Sizes with no published number of parameters are named by their width: "2048-wide"."""
    parameters = None if "wide" in size else number(size)
    return Model(family=family, size=size, case=case, sizes=sizes, parameters=parameters, gpus=gpus)


def number(size: str) -> float:
    """What "1.3B" stands for."""
    return float(size[:-1]) * {"M": 1e6, "B": 1e9}[size[-1]]


def others() -> list[Model]:
    """Families of which a size or two is enough. Sources as named."""

    def transformer(family: str, case: str, size: str, layers: int, width: int, heads: int, **rest: Any) -> Model:
        sizes = dict(layers=layers, width=width, heads=heads, dtype=jnp.float16, optimizer=ADAM) | rest
        return _model(family, size, case, sizes)

    # Devlin et al., "BERT", 2019. Raffel et al., "T5", 2020. Dosovitskiy et al., "An image is worth 16x16 words", 2021.
    words = dict(vocabulary=30_522, length=512, batch=1024)
    pairs = dict(vocabulary=32_128, source_length=512, target_length=128, batch=512)
    images = dict(image=224, classes=1000, batch=1024)
    made = [
        transformer("bert", "bert", "110M", 12, 768, 12, **words),
        transformer("bert", "bert", "340M", 24, 1024, 16, **words),
        transformer("t5", "encoder_decoder", "220M", 12, 768, 12, **pairs),
        transformer("t5", "encoder_decoder", "770M", 24, 1024, 16, **pairs),
        transformer("vit", "vit", "86M", 12, 768, 12, patch=16, **images),
        transformer("vit", "vit", "307M", 24, 1024, 16, patch=16, **images),
        transformer("vit", "vit", "632M", 32, 1280, 16, patch=14, **images),
    ]
    # Llama 3.2 1B with an output embedding of its own (1.5B), Llama 3 8B and 70B (Grattafiori et al., 2024, table 3).
    long = dict(vocabulary=128_256, length=32_768, block=1024, kv_heads=8)
    for size, layers, width, heads, feed_forward, batch in (
        ("1.5B", 16, 2048, 32, 8192, 32),
        ("8B", 32, 4096, 32, 14_336, 32),
        ("70B", 80, 8192, 64, 28_672, 32),
    ):
        rest = long | dict(feed_forward=feed_forward, batch=batch, dtype=jnp.bfloat16)
        made.append(transformer("llama", "llama", size, layers, width, heads, **rest))
    shape = dict(multiples=(1, 2, 4, 4), blocks=2, heads=8, image=64, channels=4, batch=256, optimizer=ADAM)
    for size, base in (("300M", 256), ("460M", 320)):
        made.append(_model("unet", size, "unet", dict(base=base) | shape))
    return made


def intra_operator() -> list[Model]:
    """The models of Alpa's comparison of intra-operator plans alone (section 8.2), as its repository sizes them for 1,
    2, 4 and 8 GPUs: without micro-batches.
    """
    gpts = ((1, 2048, 16), (2, 3072, 24), (4, 4096, 32), (8, 5760, 40))
    moes = ((1, 1024, 32, 8), (2, 1280, 40, 16), (4, 1536, 24, 16), (8, 1536, 24, 32))
    resnets = ((1, 160), (2, 224), (4, 320), (8, 448))
    return [
        *(gpt(f"{w}-wide", 8, w, heads, n, vocabulary=25_600, batch=8, remat=True) for n, w, heads in gpts),
        *(
            moe(f"{w}-wide-{experts}-experts", 8, w, heads, experts, n, vocabulary=VOCABULARY, batch=8)
            for n, w, heads, experts in moes
        ),
        *(wide_resnet(f"{base}-wide", 50, base, 2, n, batch=32) for n, base in resnets),
    ]


@functools.cache
def models() -> dict[str, Model]:
    """All models by name."""
    made = [
        *(gpt(size, *rest) for size, rest in GPT_SIZES.items()),
        *(moe(size, *rest) for size, rest in MOE_SIZES.items()),
        *(wide_resnet(size, *rest) for size, rest in WIDE_RESNET_SIZES.items()),
        *others(),
        *intra_operator(),
    ]
    return {model.name: model for model in made}
