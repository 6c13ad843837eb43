"""``.leangrpo/config.yaml`` as a new patch leaves it: every setting, commented out."""

DEFAULTS = """\
# Settings of the patched run, `name: value`. A LEANGRPO_* environment variable of the same name wins.
# Delete the leading `# ` to change one.

# retain: keep the rollout's graphs for the first update; reweight: walk each at once and keep a gradient per sample;
# recompute: do exactly what upstream does (the off switch); auto: measure, then choose among these
# schedule: retain

# of reweight: sample (a gradient for each sample of the first update), or affine (two per prompt group)
# buffers: sample

# how many gigabytes of kept graphs a rank may hold: measured, unlimited, or a number
# budget_gb: measured

# how many gigabytes of host memory a rank may use for graphs beyond that: a number (0: recompute them), or unlimited
# offload_gb: 0

# upstream: share gradients between ranks when upstream does; group: once per prompt group, under FSDP;
# late: once per update, also where upstream never does
# sync: upstream

# where prompts are grouped (see README): native, or shared (ranks serve one prompt together, fewer graphs at a time)
# layout: native

# faithful: all updates of a rollout train samples of one policy, as upstream; on-policy: another algorithm (see README)
# updates: faithful

# where samples of a rollout are shuffled over several updates: held-first, or upstream (hold them all, more memory)
# order: held-first

# inputs of the update that differ from the rollout's by upstream's own rounding: exact (recompute), or rounded (replay)
# inputs: exact

# compare the whole gradient with a native recomputation: first, off, or every:N windows
# audit: first
"""
