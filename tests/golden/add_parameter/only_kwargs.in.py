def step(args, **kwargs):
    return kwargs
