"""The two ways a run ends early on purpose; commands print them as one line and exit non-zero."""


class ConfigError(ValueError):
    """The user asked for something impossible: the message says what was expected, what was given, what to change."""


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read; nothing was overwritten."""


def need(ok: bool, field: str, expected: str, got, change: str) -> None:
    """Raises ConfigError if `ok` is false."""
    if not ok:
        raise ConfigError(f"{field}: expected {expected}, got {got!r}; {change}")
