def step(
        args,
        latents, 
        i,
):
    return latents
