"""The loop over layers outside of programs: threads read a layer early and write it late while a program computes."""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def by_host[Layer](
    layers: Sequence[Layer],
    read: Callable[[Layer], Any],
    compute: Callable[[Layer, Any], Any],
    write: Callable[[Layer, Any], None] = lambda l, result: None,
) -> None:
    """Calls write(l, compute(l, read(l))) for one layer l after another, a number or anything that names one.

    While layer l computes, a thread reads the next one and another writes the one before; so four layers are in host
    memory: a prefetched one, the current one before and after, and one that is being written. Errors of read
    and write are raised here.
    """
    with ThreadPoolExecutor(1, "read-ahead") as reader, ThreadPoolExecutor(1, "write-behind") as writer:
        early = deque(reader.submit(read, l) for l in layers[:1])
        late: deque = deque()
        for i, l in enumerate(layers):
            layer = early.popleft().result()
            early.extend(reader.submit(read, following) for following in layers[i + 1 : i + 2])
            late.append(writer.submit(write, l, compute(l, layer)))
            del layer
            if len(late) > 1:
                late.popleft().result()
        for last in late:
            last.result()
