"""LEANGRPO_SCHEDULE=reweight: each kept call is walked at once, its gradient scaled when the loss is known."""
