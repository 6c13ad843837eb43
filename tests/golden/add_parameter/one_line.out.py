def step(args, latents, lean_rows=None): return latents
