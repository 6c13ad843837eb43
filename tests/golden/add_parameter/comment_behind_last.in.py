def step(
    args,  # the options
    i,  # the step
):
    return i
