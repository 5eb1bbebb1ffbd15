"""Arithmetic of sizes, and their upper limits."""

import math
from collections.abc import Mapping
from typing import Any

from surojax.errors import need

# By the names in a config and a config.json: above what any model has, below what takes long to refuse later.
LARGEST = {
    "vocab_size": 2**24,
    "hidden_size": 2**20,
    "intermediate_size": 2**22,
    "num_hidden_layers": 2**11,
    "num_attention_heads": 2**14,
    "num_key_value_heads": 2**14,
    "head_dim": 2**14,
    "global_head_dim": 2**14,
    "num_global_key_value_heads": 2**14,
    "num_kv_shared_layers": 2**11,
    "hidden_size_per_layer_input": 2**16,
    "vocab_size_per_layer_input": 2**24,
    "q_lora_rank": 2**16,
    "kv_lora_rank": 2**16,
    "qk_nope_head_dim": 2**14,
    "qk_rope_head_dim": 2**14,
    "v_head_dim": 2**14,
    "mamba_n_heads": 2**14,
    "mamba_num_heads": 2**14,
    "mamba_d_head": 2**14,
    "mamba_head_dim": 2**14,
    "mamba_d_state": 2**14,
    "ssm_state_size": 2**14,
    "mamba_n_groups": 2**14,
    "n_groups": 2**14,
    "mamba_d_conv": 2**10,
    "conv_kernel": 2**10,
    "shared_intermediate_size": 2**22,
    "moe_shared_intermediate_size": 2**22,
    "moe_shared_expert_intermediate_size": 2**22,
    "num_experts": 2**16,
    "num_experts_per_tok": 2**10,
    "moe_intermediate_size": 2**22,
}
MOST_GPUS = 2**17


def check_largest(values: Mapping[str, Any], before: str) -> None:
    """Raises ConfigError for a model's size above any model's. before: text before the name in the message."""
    for name, most in LARGEST.items():
        value = values.get(name)
        if isinstance(value, int | float):
            need(value <= most, f"{before}{name}", f"at most {most:,}, as models have", value, "correct it")


def divisors(n: int) -> list[int]:
    """Returns the divisors of n in ascending order."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def largest_divisor(n: int, at_most: int) -> int:
    """Returns the largest divisor of n that is <= at_most."""
    return max(d for d in divisors(n) if d <= at_most)


def divisor(n: int, at_least: int) -> int:
    """Returns the smallest divisor of n that is >= at_least."""
    return min(d for d in divisors(n) if d >= at_least)


def row_parts(rows: int, size: int, largest: int) -> int:
    """Returns the smallest number of equal groups of a table's rows with at most `largest` elements each.

    rows, size: of the table, or of a shard of it.
    """
    return divisor(rows, -(-size // largest))
