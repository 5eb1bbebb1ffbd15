"""The config of a run: its fields, their checks, config files and flags."""

from surojax.config.fields import Config, default_config

__all__ = ["Config", "default_config"]
