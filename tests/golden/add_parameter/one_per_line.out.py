def step(
        args,
        latents, 
        i,
        lean_rows=None,
):
    return latents
