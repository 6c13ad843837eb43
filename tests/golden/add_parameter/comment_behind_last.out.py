def step(
    args,  # the options
    i,  # the step
    lean_rows=None,
):
    return i
