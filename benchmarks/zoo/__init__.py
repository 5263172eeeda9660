"""Training steps of every kind that the compiler is tried on, each small enough to compile in seconds on a CPU."""

from collections.abc import Callable

from benchmarks.zoo.bert import bert
from benchmarks.zoo.case import Case
from benchmarks.zoo.encoder_decoder import encoder_decoder
from benchmarks.zoo.fixed_point import fixed_point
from benchmarks.zoo.gpt import gpt, gpt_bf16, gpt_odd, gpt_remat
from benchmarks.zoo.gpt_scan import gpt_scan, gpt_scan_remat
from benchmarks.zoo.llama import llama
from benchmarks.zoo.lstm import lstm
from benchmarks.zoo.mlp import mlp
from benchmarks.zoo.moe import gshard_moe, moe
from benchmarks.zoo.nnx_model import nnx_model
from benchmarks.zoo.optimizers import gpt_adafactor, gpt_adamw, mlp_multi_steps
from benchmarks.zoo.resnet import resnet
from benchmarks.zoo.stateful import bookkeeping, dropout, loss_scaling
from benchmarks.zoo.unet import unet
from benchmarks.zoo.vit import vit
from benchmarks.zoo.wide_resnet import wide_resnet

CASES: dict[str, Callable[..., Case]] = {
    case.__name__: case
    for case in (
        mlp,
        mlp_multi_steps,
        dropout,
        bookkeeping,
        loss_scaling,
        fixed_point,
        gpt,
        gpt_remat,
        gpt_bf16,
        gpt_odd,
        gpt_adamw,
        gpt_adafactor,
        gpt_scan,
        gpt_scan_remat,
        llama,
        moe,
        gshard_moe,
        bert,
        encoder_decoder,
        vit,
        resnet,
        wide_resnet,
        unet,
        lstm,
        nnx_model,
    )
}

__all__ = ["CASES", "Case"]
