"""Ways of running a script that a bench times in turn."""

from __future__ import annotations

import dataclasses

from leangrpo_rehearsal.base import Config

AUTO_ROLLOUTS = 10
"""Where the run itself chooses: a native rollout, one with the probe, six that may be compared, and two that count."""


def ways(config: Config) -> dict[str, Config]:
    """By name: native first, then what the schedule asks for.

    `all` is each schedule, with LEANGRPO_SYNC as in `config`, and on several ranks also with one reduction per update.
    """
    found = {"native": config, "recompute": dataclasses.replace(config, schedule="recompute")}
    if config.schedule == "all":
        for name in ("recompute", "retain"):
            found[name] = dataclasses.replace(config, schedule=name)
            if config.ranks > 1 and config.sync != "late":
                found[f"{name} late"] = dataclasses.replace(found[name], sync="late")
        return found | _reweighted(config)
    if config.schedule == "auto":
        found["retain"] = dataclasses.replace(config, schedule="retain")
        found |= _reweighted(config)
        updates = AUTO_ROLLOUTS * config.updates_per_rollout
        return found | {"auto": dataclasses.replace(config, updates=updates)}
    return found | {config.schedule: config}


def _reweighted(config: Config) -> dict[str, Config]:
    return {
        f"reweight {buffers}": dataclasses.replace(config, schedule="reweight", buffers=buffers)
        for buffers in ("sample", "affine")
    }
