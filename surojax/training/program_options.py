"""Chooses the XLA options of the programs of a run: its step, its evaluation, a reference, a teacher's labels."""

from typing import Any

from surojax.assembly.assemble import Assembly
from surojax.assembly.xla_options import compiler_options
from surojax.config.fields import Config
from surojax.untrusted import expanded


def program_options(c: Config, run: Assembly, platform: str, **memory: float | None) -> dict[str, Any]:
    """Returns the XLA options that a run's programs are compiled with on a platform, "gpu" or "cpu".

    memory: of a step, see `compiler_options`.
    """
    return compiler_options(run, platform, **memory) | kept_choices(c, platform)  # pyright: ignore[reportArgumentType]


def kept_choices(c: Config, platform: str) -> dict[str, str]:
    """Returns the XLA option that keeps the kernels that XLA chose by timing, in a folder of this machine.

    A program of another run, or of this run resumed, then takes the same kernel for the same product. XLA's entries
    name the GPU and the operation. Without a folder that can be written, each program chooses by itself.
    """
    if platform != "gpu":
        return {}
    folder = expanded(c.data_cache) / "kernels"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return {}
    return {"xla_gpu_per_fusion_autotune_cache_dir": str(folder)}
