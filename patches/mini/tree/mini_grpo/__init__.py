"""mini_grpo: GRPO for a small flow-matching transformer, in one readable trainer."""
