"""Chooses the XLA options of the programs of a run: its step, its evaluation, a reference, a teacher's labels."""

from typing import Any

from surojax.assembly.assemble import Assembly
from surojax.assembly.xla_options import compiler_options
from surojax.config.fields import Config
from surojax.training.kernel_choices import kept_choices


def program_options(c: Config, run: Assembly, platform: str, **memory: float | None) -> dict[str, Any]:
    """Returns the XLA options that a run's programs are compiled with on a platform, "gpu" or "cpu".

    memory: of a step, see `compiler_options`.
    """
    return compiler_options(run, platform, **memory) | kept_choices(c, platform)  # pyright: ignore[reportArgumentType]
