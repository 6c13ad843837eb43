"""One module per rehearsed training script; recipes name them (`rehearsal: dancegrpo_flux`)."""
