def step(args, latents: "Tensor",
         i: int = 0):
    return latents
