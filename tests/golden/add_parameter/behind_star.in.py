def step(args, *rest):
    return rest
