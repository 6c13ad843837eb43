def step(args, latents: "Tensor",
         i: int = 0,
         lean_rows=None):
    return latents
