def step(args, latents): return latents
