"""Padded, bucketed and packed batches of a published distribution of lengths, by `autopar.fit`.

    python -m benchmarks.sequence_lengths --cluster dgx-h100

The step is that of two layers of BERT-Large, pre-trained at a length of 512; the lengths are those of Wikipedia's
sequences for it.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np

import autopar
from benchmarks.zoo.bert import bert

# Tokens by which 0, 5, 10, ..., 100 % of the sequences have ended: of the counts by length of 16,279,552 sequences that
# Krell, Kosec, Perez and Fitzgibbon publish with "Efficient Sequence Packing without Cross-contamination", 2021
# (graphcore/tutorials, blogs_code/packedBERT/histograms.py). Half of all positions are padding there.
QUANTILES = (
    1, 36, 48, 59, 70, 84, 100, 120, 143, 171, 204, 243, 288, 342, 407, 484, 512, 512, 512, 512, 512,
)  # fmt: skip
SEQUENCES = 4000
LARGE = {"width": 1024, "heads": 16, "vocabulary": 30_522, "length": 512}


def sample() -> np.ndarray:
    """Lengths at equal steps of the distribution."""
    at = (np.arange(SEQUENCES) + 0.5) / SEQUENCES * (len(QUANTILES) - 1)
    return np.interp(at, np.arange(len(QUANTILES)), QUANTILES).round().astype(int)


def batch(examples: int, length: int) -> dict[str, jax.ShapeDtypeStruct]:
    kinds = {"tokens": "int32", "targets": "int32", "real": "bool", "predict": "bool"}
    return {name: jax.ShapeDtypeStruct((examples, length), kind) for name, kind in kinds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", default="dgx-h100")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--buckets", type=int, default=4)
    options = parser.parse_args()
    case = bert(layers=options.layers, dtype=jnp.bfloat16, **LARGE)
    state = jax.eval_shape(case.init, jax.random.key(0))
    search = autopar.Search(effort="quick", attention="blockwise")
    step = autopar.parallelize(case.step, search=search, cache_dir=None)
    print(
        autopar.fit(
            step, state, batch, clusters=options.cluster, lengths=sample(), buckets=options.buckets, multiple=512
        )
    )


if __name__ == "__main__":
    main()
