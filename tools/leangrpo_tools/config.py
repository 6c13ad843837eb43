"""``.leangrpo/config.yaml`` as a new patch leaves it: every setting, commented out."""

DEFAULTS = """\
# Settings of the patched run, `name: value`. A LEANGRPO_* environment variable of the same name wins.
# Delete the leading `# ` to change one.

# retain: keep the rollout's graphs for the first update; recompute: do exactly what upstream does (the off switch)
# schedule: retain

# how many gigabytes of kept graphs a rank may hold: measured, unlimited, or a number
# budget_gb: measured

# how many gigabytes of host memory a rank may use for graphs beyond that (0: they are recomputed): a number, or unlimited
# offload_gb: 0

# upstream: share gradients between ranks when upstream does; late: once per update, also where upstream never does
# sync: upstream

# compare the whole gradient with a native recomputation: first, off, or every:N windows
# audit: first
"""
