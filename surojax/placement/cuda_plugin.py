"""The version of JAX's CUDA plugin, which holds the XLA that compiles and runs programs on NVIDIA GPUs.

It need not be jaxlib's. XLA of 0.11 sends host copies of both directions in turn over its four compute streams; that of
0.12 has a stream for each direction, which copies beside products and beside the other direction. Source: the thunks of
compiled steps (docs/log, 2026-11-28).
"""

import functools
import importlib

from jaxlib.version import __version_info__ as jaxlib_version

PLUGINS = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")
STREAMS_BY_DIRECTION = (0, 12)  # the first version with a stream for each direction of host copies
INSTALL = "pip install -U 'surojax[cuda]'"


@functools.cache
def plugin_version() -> tuple[int, ...]:
    """Returns the version of the CUDA plugin that JAX loads; that of jaxlib if there is no plugin."""
    for plugin in PLUGINS:
        try:
            return importlib.import_module(f"{plugin}.version").__version_info__
        except ImportError:
            continue
    return jaxlib_version


def plugin_version_text() -> str:
    """Returns the version as text, such as "0.12.0.1"."""
    return ".".join(map(str, plugin_version()))


def copies_slowly() -> str:
    """Returns a line that says why offloads are slow with the installed plugin, and the remedy; "" if they are not."""
    if plugin_version() >= STREAMS_BY_DIRECTION:
        return ""
    return (
        f"offloads: the CUDA plugin {plugin_version_text()} copies to and from host memory in turn, 0.12 at the same "
        f"time (a step of 7B with five offloads takes 3.8 s instead of 2.7 s, predicted for an H200); {INSTALL}"
    )
