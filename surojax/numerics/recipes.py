"""Recipes: the formats of the operands of a block's matrix products, forward and backward.

| recipe      | operands forward        | gradients | scales                                                     |
|-------------|-------------------------|-----------|------------------------------------------------------------|
| bf16        | matmul_dtype            | gradient_dtype | none                                                  |
| fp8_hybrid  | e4m3, scaled per tensor | e5m2      | delayed: from the largest magnitudes of the last steps     |
| fp8_current | e4m3, scaled per tensor | e5m2      | just in time: from this tensor's largest magnitude         |
| mxfp8       | e4m3, blocks of 32      | e4m3      | a power of two for each block (OCP MX)                     |
| nvfp4       | e2m1, blocks of 16      | e2m1      | e4m3 for each block, float32 for the tensor                |

A recipe applies to the linear layers of blocks. Embedding, head, norms, softmax and the residual stream stay in
`model_dtype`. Products accumulate in float32. The first `skip_first` and the last `skip_last` blocks use bf16.
"""

import dataclasses
from typing import Any

import jax

from pallas_kernels import dispatch
from surojax.declared import AT_LEAST_0, AT_LEAST_1, FLOATS, Facts, Range, at_most, declare
from surojax.errors import ConfigError

RECIPES = ("bf16", "fp8_hybrid", "fp8_current", "mxfp8", "nvfp4")
BLOCK_SCALED = ("mxfp8", "nvfp4")
BLOCK_SCALED_PRODUCTS = ("auto", "native", "emulated")
KERNELS = ("auto", "xla", "mosaic")
MARGINS = Range("0 to 8 binades", "each one more makes small numbers coarser; 0 is usual", least=0, most=8)


@dataclasses.dataclass(frozen=True)
class Precision:
    """A recipe and its settings, fields of the config."""

    # bf16, fp8_hybrid (delayed scaling), fp8_current (just in time), mxfp8 or nvfp4
    recipe: str = declare("bf16", choices=RECIPES, facts=Facts.COST_AND_NUMBERS)
    # recipe bf16: operands of products, bfloat16 or float32; "" = model_dtype
    matmul_dtype: str = declare("", choices=("", *FLOATS), facts=Facts.COST_AND_NUMBERS)
    # recipe bf16: gradients in the backward pass's products; "" = matmul_dtype
    gradient_dtype: str = declare("", choices=("", *FLOATS), facts=Facts.COST)
    # fp8_hybrid: a scale follows from the largest magnitude in this many steps
    amax_history: int = declare(16, AT_LEAST_1, at_most(2**16), facts=Facts.COST_AND_NUMBERS, name="fp8_amax_history")
    # fp8_hybrid: binades left free above the largest magnitude seen, 0 to 8
    margin: int = declare(0, MARGINS, facts=Facts.COST_AND_NUMBERS, name="fp8_margin")
    # mxfp8, nvfp4: "native" (sm_100, sm_120), "emulated", "auto" = native on GPUs
    block_scaled_products: str = declare("auto", choices=BLOCK_SCALED_PRODUCTS, facts=Facts.COST)
    # number of first blocks that use recipe bf16
    skip_first: int = declare(0, AT_LEAST_0, facts=Facts.COST_AND_NUMBERS, name="skip_quant_first_layers")
    # number of last blocks that use recipe bf16
    skip_last: int = declare(0, AT_LEAST_0, facts=Facts.COST_AND_NUMBERS, name="skip_quant_last_layers")
    # between products, and delta nets: "xla" = XLA's, "mosaic" = our kernels (NVIDIA), "auto" = ours on GPUs
    kernels: str = declare("xla", choices=KERNELS, facts=Facts.COST)

    @property
    def fp8(self) -> bool:
        """True if `models.linear_fp8` computes the products: its weights are in float8 with one scale per matrix."""
        return self.recipe in ("fp8_hybrid", "fp8_current")

    @property
    def emulate(self) -> bool:
        """True if products of mxfp8 and nvfp4 are emulated."""
        setting = self.block_scaled_products
        return setting == "emulated" or (setting == "auto" and jax.default_backend() != "gpu")

    @property
    def delayed(self) -> bool:
        """True if scales are computed from a history, which is then part of the training state."""
        return self.recipe == "fp8_hybrid"

    @property
    def implementation(self) -> Any:
        """The argument `implementation` of kernels: None (automatic), "xla" or "mosaic"."""
        return None if self.kernels == "auto" else self.kernels

    def enabled(self, l: int, num_layers: int) -> bool:
        """True if layer l of a model uses the recipe, False if it is skipped."""
        return self.skip_first <= l < num_layers - self.skip_last


def check_recipe(precision: Precision, name: str, device: Any) -> None:
    """Raises ConfigError if a device does not support the products of a recipe. name: of the device, for the message.

    device: a JAX device, or a `gpus.Gpu`. CPUs convert float8 operands to a wider dtype and emulate block-scaled
    products.
    """
    stated = getattr(device, "compute_capability", None)  # as text; None on CPUs
    capability = dispatch.capability(device)
    native = precision.recipe in BLOCK_SCALED and precision.block_scaled_products != "emulated"
    if stated is None:
        if native and not precision.emulate:
            raise ConfigError(
                f"block_scaled_products: expected 'auto' or 'emulated' on {name}, got 'native'; it needs a GPU"
            )
        return
    name = f"{name} (compute capability {stated})"
    if precision.fp8 and (capability is None or capability < (8, 9)):
        raise ConfigError(
            f"recipe: expected 'bf16' on {name}, got {precision.recipe!r}, whose float8 products need NVIDIA's 8.9 or "
            "newer (RTX 40, H100); use recipe='bf16'"
        )
    if native and (capability is None or capability < (10, 0)):
        raise ConfigError(
            f"recipe: expected 'bf16' or 'fp8_current' on {name}, got {precision.recipe!r}, whose block-scaled "
            "products need NVIDIA's 10.0 or newer (B200, RTX 50); to try its numbers slowly, set "
            "block_scaled_products='emulated'"
        )
