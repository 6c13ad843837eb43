def step(
    args,
    latents
) -> int:
    return latents
