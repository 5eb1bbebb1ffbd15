"""Attention to all positions in a model whose other layers have a window, with heads of its own number and size."""

import dataclasses
from typing import ClassVar

from flax import nnx

from surojax.models.kinds.self_attention import Attention


class GlobalAttention(Attention):
    """Attention with `global_head_dim` channels of a head and `num_global_key_value_heads` (Gemma 4).

    With `attention_k_eq_v` values are the products that keys are made of, before norm and rotary embedding.
    """

    kept_as: ClassVar = "global"
    fields: ClassVar = ("model.global_head_dim", "model.num_global_key_value_heads")

    def __init__(self, config, *, rngs: nnx.Rngs | None = None):
        heads = config.num_global_key_value_heads or config.num_key_value_heads
        h = config.global_head_dim or config.head_dim
        super().__init__(dataclasses.replace(config, head_dim=h, num_key_value_heads=heads), rngs=rngs)

    @property
    def values_are_keys(self) -> bool:
        return self.config.attention_k_eq_v
