def step(
    args,
    latents,
    lean_rows=None
) -> int:
    return latents
