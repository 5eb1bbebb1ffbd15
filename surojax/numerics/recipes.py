"""Recipes: in which numbers a block's matrix products are computed, forward and backward.

| recipe      | operands forward        | gradients | scales                                                     |
|-------------|-------------------------|-----------|------------------------------------------------------------|
| bf16        | matmul_dtype            | gradient_dtype | none                                                  |
| fp8_hybrid  | e4m3, scaled per tensor | e5m2      | delayed: from the largest magnitudes of the last steps     |
| fp8_current | e4m3, scaled per tensor | e5m2      | just in time: from this tensor's largest magnitude         |
| mxfp8       | e4m3, blocks of 32      | e4m3      | a power of two for each block (OCP MX)                     |
| nvfp4       | e2m1, blocks of 16      | e2m1      | e4m3 for each block, float32 for the tensor                |

A recipe is for the blocks' linear layers; embedding, head, norms, softmax and the residual stream stay in
`model_dtype`, products add up in float32, and the first `skip_first` and last `skip_last` blocks compute as bf16 does.
"""

import dataclasses
from typing import Any

import jax

from pallas_kernels import dispatch
from surojax.errors import ConfigError

RECIPES = ("bf16", "fp8_hybrid", "fp8_current", "mxfp8", "nvfp4")
BLOCK_SCALED = ("mxfp8", "nvfp4")
BLOCK_SCALED_PRODUCTS = ("auto", "native", "emulated")
KERNELS = ("auto", "xla", "mosaic")


@dataclasses.dataclass(frozen=True)
class Precision:
    """A recipe and its settings.

    matmul_dtype, gradient_dtype: of the products of recipe bf16 and of skipped blocks, "" = that of their operands.
    amax_history, margin: of fp8_hybrid: steps that a scale looks back on, and binades left free above them.
    kernels: "auto", "xla" or "mosaic": what computes that which lies between products, see pallas_kernels.dispatch.
    block_scaled_products: of mxfp8 and nvfp4: "native" needs a GPU that has them; "emulated" multiplies the same
    numbers as float32; "auto" is native where the default backend is a GPU.
    """

    recipe: str = "bf16"
    matmul_dtype: str = ""
    gradient_dtype: str = ""
    amax_history: int = 16
    margin: int = 0
    skip_first: int = 0
    skip_last: int = 0
    kernels: str = "xla"
    block_scaled_products: str = "auto"

    @property
    def fp8(self) -> bool:
        """Whether blocks compute with `models.llama_fp8`: weights reach them as float8 with a scale."""
        return self.recipe in ("fp8_hybrid", "fp8_current")

    @property
    def emulate(self) -> bool:
        """Whether products of mxfp8 and nvfp4 are emulated."""
        how = self.block_scaled_products
        return how == "emulated" or (how == "auto" and jax.default_backend() != "gpu")

    @property
    def delayed(self) -> bool:
        """Whether scales come from a history, which is then a part of the training state."""
        return self.recipe == "fp8_hybrid"

    @property
    def implementation(self) -> Any:
        """What kernels are told."""
        return None if self.kernels == "auto" else self.kernels

    def enabled(self, l: int, num_layers: int) -> bool:
        """Whether layer l of a model computes in the recipe's numbers."""
        return self.skip_first <= l < num_layers - self.skip_last


def check_recipe(precision: Precision, name: str, device: Any) -> None:
    """Raises ConfigError for a recipe whose products a device does not have, called `name` there.

    device: of JAX, or `gpus.Gpu`. On CPUs float8 is converted, and block-scaled products are emulated.
    """
    said, found = getattr(device, "compute_capability", None), dispatch.capability(device)
    native = precision.recipe in BLOCK_SCALED and precision.block_scaled_products != "emulated"
    if said is None:
        if native and not precision.emulate:
            raise ConfigError(
                f"block_scaled_products: expected 'auto' or 'emulated' on {name}, got 'native'; it needs a GPU"
            )
        return
    name = f"{name} (compute capability {said})"
    if precision.fp8 and (found is None or found < (8, 9)):
        raise ConfigError(
            f"recipe: expected 'bf16' on {name}, got {precision.recipe!r}, whose float8 products need NVIDIA's 8.9 or "
            "newer (RTX 40, H100); use recipe='bf16'"
        )
    if native and (found is None or found < (10, 0)):
        raise ConfigError(
            f"recipe: expected 'bf16' or 'fp8_current' on {name}, got {precision.recipe!r}, whose block-scaled "
            "products need NVIDIA's 10.0 or newer (B200, RTX 50); to try its numbers slowly, set "
            "block_scaled_products='emulated'"
        )
