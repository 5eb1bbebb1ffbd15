"""What a kind of mixer or MLP declares, so that no other room knows one kind from another.

    layer = norm + mixer, norm + MLP

A mixer moves values between the tokens of a sequence (self_attention.py), an MLP computes each token by itself
(gated_mlp.py, experts.py). A kind is one class in one file: parameters and function, and beside them these
declarations. The checks of a config, adapters, readers of files, the sampler and the planner ask the sublayers of a
model, and know none.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx


class Width(NamedTuple):
    """A width of a sublayer's matrices that the GPUs of a tensor-parallel group divide.

    name: the field, or product of fields, that it follows from. size: in the whole model. field, parts: the number that
    the GPUs divide, such as heads, and what it follows from. shared: GPUs that are more than the parts may have the
    same one, as the mesh says. copied: they may compute the same one each, whatever the mesh says.
    """

    name: str
    size: int
    field: str
    parts: int
    shared: bool = False
    copied: bool = False

    def is_divided(self, gpus: int) -> bool:
        """True if so many GPUs can divide the parts, or share them."""
        return self.parts % gpus == 0 or ((self.shared or self.copied) and gpus % self.parts == 0)

    def part(self, gpus: int) -> "Width":
        """The width on each of so many GPUs."""
        parts = max(self.parts // gpus, 1)
        return self._replace(parts=parts, size=parts * (self.size // self.parts))


def undivided(field: str, size: int) -> Width:
    """A width of which GPUs may have any part. field: the field, or product of fields, that it follows from."""
    return Width(field, size, field, size)


class FileNames(NamedTuple):
    """The names of a parameter in files, after those of its layer; "": the format has none that most families share."""

    safetensors: str
    gguf: str = ""


class Target(NamedTuple):
    """A matrix that may have an adapter.

    module: the name of its module in a layer of transformers, by whose end PEFT selects it. matrix: its name in the
    block. width: of its side that is not `hidden_size`. of_experts: it is of each expert.
    """

    module: str
    matrix: str
    width: int
    of_experts: bool = False


class Sublayer(nnx.Module):
    """A mixer or an MLP. Made without `rngs`, it has no parameters and only declares.

    name: of the module in the block, and so of its part of a tree of parameters. input: the name of its first products'
    input, see `linear.Product`. tensors: {name of a parameter in it:
    its names in files}, of most families.
    """

    name: ClassVar[str]
    input: ClassVar[str]
    tensors: ClassVar[Mapping[str, FileNames]]

    def __init__(self, config: Any = None, *, rngs: nnx.Rngs | None = None):
        """config: the architecture, such as a `DecoderConfig`."""
        self.config = config

    def widths(self) -> Sequence[Width]:
        """The widths of its matrices besides `hidden_size`: `tp` divides them, and recipes ask for multiples."""
        return ()

    def targets(self) -> Sequence[Target]:
        """The matrices that may have adapters."""
        return ()

    def target(self, matrix: str, width: Width, *, of_experts: bool = False) -> Target:
        """Makes the `Target` of this matrix. width: of its side that is not `hidden_size`."""
        module = self.tensors[matrix].safetensors.removesuffix(".weight")
        return Target(module, f"{self.name}.{matrix}", width.size, of_experts)


class ContextNumbers(NamedTuple):
    """Numbers that a GPU of `cp` sends to others in a forward pass over one layer.

    exchanged, keys: of each of its tokens, with cp_method="ulysses": those of queries and results, and of keys and
    values, its own part included. pieces: with other methods, keys and values of a token to one other GPU. halo, maps:
    of each of its pieces of a row to each other GPU, in the model's dtype and in float32 (models/row_pieces.py).
    """

    exchanged: int = 0
    keys: int = 0
    pieces: int = 0
    halo: int = 0
    maps: int = 0


class OnGpu(NamedTuple):
    """The input of a sublayer on one GPU, `[rows, tokens, D]`.

    itemsize: bytes of a number. tensor: GPUs of a tensor-parallel group. per_sequence: GPUs that share a sequence.
    chunks: the tokens are one of so many equal parts, which attends to all of them.
    """

    rows: int
    tokens: int
    dtype: Any
    tensor: int
    per_sequence: int
    chunks: int

    @property
    def itemsize(self) -> int:
        return jnp.dtype(self.dtype).itemsize


class MovedBytes(NamedTuple):
    """Bytes that kernels read and write in a forward pass, again if it is recomputed, and in a backward pass."""

    forward: int = 0
    again: int = 0
    backward: int = 0


class KernelBytes(NamedTuple):
    """Bytes of a mixer's kernels on a GPU. saved: for the backward pass. working: in it. scores: part of that.

    repeated: FLOPs of its attention, (forward, backward), relative to those of two products and of five. moved: beside
    the block's residuals, of a mixer whose small products take less time than that; None: the products take longer.
    """

    saved: int = 0
    working: int = 0
    scores: int = 0
    repeated: tuple[float, float] = (1.0, 1.0)
    moved: MovedBytes | None = None


class Mixer(Sublayer):
    """A sublayer whose tokens depend on each other.

    appends: what later tokens read of earlier ones grows with them, as keys and values do; if not, it is a state that
    each next token replaces.
    """

    appends: ClassVar[bool] = False

    def decode_state(self, rows: int, positions: int, dtype) -> Any:
        """Shapes of the state of a layer that sampling hands on, with room for so many positions of each row."""
        return ()

    def decode_bytes(self, queries: int, positions: int) -> int:
        """Bytes of intermediate values of a row while sampling computes so many new positions."""
        return 0

    def flops(self, sequence_len: int, window: int) -> float:
        """Forward FLOPs per token of a layer's products that are not with weights. window: see `Variant`."""
        return 0.0

    def space(self, compute, x: OnGpu, *, gpu: bool, packed: bool, window: bool) -> KernelBytes:
        """The `KernelBytes` of a layer with an input like x, besides the residuals of the block with attention by XLA.

        compute: a `Compute`. window: some layers have one.
        """
        return KernelBytes()

    def bytes_between_chunks(self, x: OnGpu) -> int:
        """Bytes of a layer that chunks of a sequence hand on, together: of a state those of `decode_state`."""
        states = jax.tree.leaves(self.decode_state(x.rows, 0, x.dtype))
        return (x.chunks - 1) * sum(math.prod(s.shape) * s.dtype.itemsize for s in states) // x.tensor

    def context_numbers(self, tp: int, cp: int) -> ContextNumbers:
        """The `ContextNumbers` of a layer."""
        return ContextNumbers()

    def implementation(
        self,
        asked: str,
        dtype,
        *,
        packed: bool,
        gpu: bool | None = None,
        hopper: bool | None = None,
        window: bool = False,
        piece: int = 0,
    ) -> str:
        """The implementation that computes it if the config asks for `asked`; "" if it has only one.

        gpu, hopper: True or False: on a GPU, of sm_90, or not; None: on the device of this program. Other arguments:
        see `attention.chosen_implementation`.
        """
        return ""

    def exchanges_heads(self, tp: int, cp: int) -> bool:
        """True if cp_method="ulysses" can divide the heads of a tensor-parallel group over `cp`."""
        return True

    def check_context(self, c) -> None:
        """Checks the sizes that `cp` divides. c: a config with cp_size > 1. Raises ConfigError."""


class Mlp(Sublayer):
    """A sublayer that computes each token by itself.

    has_experts: a router chooses which of several compute it. reads_residual: it is given the residual stream and the
    layer's norm, and not what is normed.
    """

    name = "mlp"
    input = "mlp_input"
    has_experts: ClassVar[bool] = False
    reads_residual: ClassVar[bool] = False


class NoMixer(Mixer):
    """In place of the mixer of layers that have an MLP alone."""

    name = ""
    input = ""
    tensors: ClassVar = {}


class NoMlp(Mlp):
    """In place of the MLP of layers that have a mixer alone."""

    input = ""
    tensors: ClassVar = {}


class LayerKinds(NamedTuple):
    """The sublayers of a segment's layers, as declarations. own_input: of layers with one; None: they have none."""

    mixer: Mixer
    mlp: Mlp
    own_input: Sublayer | None = None

    @property
    def all(self) -> list[Sublayer]:
        """All of them."""
        return [self.mixer, self.mlp, *([] if self.own_input is None else [self.own_input])]

    def widths(self) -> list[Width]:
        """The widths of all."""
        return [width for sublayer in self.all for width in sublayer.widths()]
