"""Schedules of the learning rate: a warmup, then one of several decays."""

import functools

import optax

Schedule = optax.Schedule
SCHEDULES = ("cosine", "linear", "wsd")


@functools.cache
def learning_rate_schedule(
    kind: str,
    *,
    peak: float,
    total_steps: int,
    warmup_steps: int = 0,
    cooldown_steps: int = 0,
    final_fraction: float = 0.0,
) -> Schedule:
    """Returns a schedule for steps 0 to total_steps - 1: linear warmup to `peak`, then a decay of this kind.

    cosine, linear: from the peak to peak * final_fraction at the last step. wsd: constant at the peak, then linear over
    the last `cooldown_steps` (Hu et al. 2024, MiniCPM). Raises ValueError for another kind.
    """
    final = peak * final_fraction
    after = max(total_steps - warmup_steps - 1, 1)
    if kind == "cosine":
        main = optax.cosine_decay_schedule(peak, after, alpha=final_fraction)
    elif kind == "linear":
        main = optax.linear_schedule(peak, final, after)
    elif kind == "wsd":
        stable = total_steps - warmup_steps - cooldown_steps
        cooldown = optax.linear_schedule(
            peak + (final - peak) / max(cooldown_steps, 1), final, max(cooldown_steps - 1, 1)
        )
        main = optax.join_schedules([optax.constant_schedule(peak), cooldown], [stable])
    else:
        raise ValueError(f"lr_scheduler_type: expected one of {', '.join(SCHEDULES)}, got {kind!r}")
    if not warmup_steps:
        return main
    warmup = optax.linear_schedule(peak / warmup_steps, peak, max(warmup_steps - 1, 1))
    return optax.join_schedules([warmup, main], [warmup_steps])
