"""The two ways a run ends early on purpose; commands print them as one line and exit non-zero."""


class ConfigError(ValueError):
    """The user asked for something impossible: the message says what was expected, what was given, what to change."""


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read; nothing was overwritten."""


def need(ok: bool, field: str, expected: str, got, change: str) -> None:
    """Raises ConfigError if `ok` is false."""
    if not ok:
        raise ConfigError(f"{field}: expected {expected}, got {got!r}; {change}")


# What `train` and `launch` exit with. Others, 128 + a signal's number, are those of processes that a signal ended.
EXIT_CODES = {
    0: "finished, or nothing was left to do",
    1: "an error, said in a line: mend it and start the same command again",
    75: "asked to stop (SIGTERM, Ctrl-C, --max-minutes) and saved, not finished: start the same command again",
    130: "Ctrl-C where nothing is saved any more or yet: start the same command again",
}


def exit_codes() -> str:
    """The exit codes as lines for `--help`."""
    return "\n".join(["exit codes:", *(f"  {code:<4} {meaning}" for code, meaning in EXIT_CODES.items())])
