"""Work weights of a segment for programs that the host runs: stacks in memory, and layers that come from files.

A stack in memory is an argument, whatever part of it a program uses. Of a stack in files a program gets one layer, as a
round (`in_file.InFiles`). The update and the makers of states return it the same way.
"""

from typing import Any

import jax

from surojax.memory.host import LayerStack, join_parts, parts, read, write_layer
from surojax.memory.in_file import InFiles
from surojax.placement.home import DEVICE, HOST
from surojax.step.between import in_rounds, of_round


class WorkWeights:
    """The parts of a segment's work weights (`host.parts`), planned or built.

    parts: of the plan. layers: of each part, those of each stage of `pp`. part_of: number of the part of each of them.
    Weights in files have one stage.
    """

    def __init__(self, weights: Any, stages: int = 1):
        """weights: the segment's plan."""
        self.parts: list[LayerStack] = parts(weights)
        self.files = [InFiles(part.stack) for part in self.parts]
        self.layers = [range(part.start // stages, part.stop // stages) for part in self.parts]
        self.part_of = [i for i, layers in enumerate(self.layers) for _ in layers]

    @property
    def in_files(self) -> bool:
        """True if some are in files."""
        return any(files.stacks for files in self.files)

    # -- State ---------------------------------------------------------------------------------------------------------

    def in_memory(self, weights: Any) -> list[list]:
        """The stacks in memory of each part of weights."""
        return [files.in_memory(part.stack) for files, part in zip(self.files, parts(weights), strict=True)]

    def joined(self, in_memory: list[list]) -> Any:
        """Returns the segment's work weights with these stacks in memory."""
        return join_parts([self.like(number, stacks) for number, stacks in enumerate(in_memory)])

    def read(self, l: int) -> list[jax.Array]:
        """Reads layer l from files and starts its copy to device memory, a round of each stack. Raises NvmeError."""
        number = self.part_of[l]
        return self.on_device(l, self.files[number].read([l - self.layers[number].start]))

    def on_device(self, l: int, rounds: list[jax.Array]) -> list[jax.Array]:
        """Starts the copy of layer l's rounds to device memory."""
        return jax.device_put(rounds, [file.round_sharding(DEVICE) for file in self.files[self.part_of[l]].stacks])

    def write(self, l: int, rounds: list) -> None:
        """Writes the rounds of layer l that `replaced` returned to files. Raises NvmeError."""
        number = self.part_of[l]
        self.files[number].write([l - self.layers[number].start], rounds)

    # -- Programs ------------------------------------------------------------------------------------------------------

    def planned(self, number: int) -> tuple[list, list[jax.ShapeDtypeStruct]]:
        """The plan of a program's arguments for layers of a part: (stacks in memory, rounds)."""
        files = self.files[number]
        return files.in_memory(self.parts[number].stack), files.planned_round(DEVICE)

    def arriving(self, number: int) -> list[jax.ShapeDtypeStruct]:
        """Plans the arrays of the next layer from files, which arrives while a layer of this part computes."""
        return [*self.files[number].planned_round(HOST), *self.files[number].planned_round(DEVICE)]

    def layer(self, number: int, arguments: tuple[list, list], l: jax.Array | int):
        """Layer l of the segment, which is in this part, in device memory. Inside `jit`."""
        in_memory, rounds = arguments
        return self.files[number].joined(read(in_memory, l - self.layers[number].start), of_round(rounds))

    def like(self, number: int, in_memory: list) -> Any:
        """Returns a part's tree with these stacks in memory, and plans in place of stacks in files."""
        files = self.files[number]
        return files.joined(in_memory, files.files(self.parts[number].stack))

    def replaced(self, number: int, in_memory: list, layer: Any, l: jax.Array | int) -> tuple[list, list]:
        """Returns (in-memory stacks with layer l replaced, arrays to write to files). Inside `jit`."""
        files = self.files[number]
        stacks = write_layer(in_memory, files.in_memory(layer), l - self.layers[number].start)
        return stacks, in_rounds(files.files(layer))
