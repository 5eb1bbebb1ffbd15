"""What may be set: the fields of a run, their checks, config files and flags."""

from surojax.config.fields import Config, default_config

__all__ = ["Config", "default_config"]
