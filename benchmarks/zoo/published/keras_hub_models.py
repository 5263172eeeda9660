"""The Mixtral of KerasHub, with random weights."""

from benchmarks.zoo.case import Case, PyTree
from benchmarks.zoo.data import next_token_batch
from benchmarks.zoo.published.keras_models import keras_case


def keras_hub_mixtral(
    *,
    layers: int = 2,
    width: int = 32,
    heads: int = 4,
    kv_heads: int = 2,
    experts: int = 4,
    vocabulary: int = 64,
    length: int = 16,
    batch: int = 8,
) -> Case:
    """All experts compute all tokens, and the router's weights select among their results."""
    import keras
    import keras_hub

    def create() -> PyTree:
        backbone = keras_hub.models.MixtralBackbone(
            vocabulary_size=vocabulary,
            num_layers=layers,
            num_query_heads=heads,
            hidden_dim=width,
            intermediate_dim=2 * width,
            num_key_value_heads=kv_heads,
            num_experts=experts,
            sliding_window=length,
        )
        tokens = keras.Input((length,), dtype="int32")
        padding = keras.ops.ones_like(tokens)
        hidden = backbone({"token_ids": tokens, "padding_mask": padding})
        return keras.Model(tokens, backbone.token_embedding(hidden, reverse=True))

    make_batch = next_token_batch(batch=batch, length=length, vocabulary=vocabulary)
    return keras_case(name="keras_hub_mixtral", create=create, batch=make_batch, inputs="tokens", labels="targets")


CASES = (keras_hub_mixtral,)
