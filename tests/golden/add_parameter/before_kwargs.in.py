def step(args, *, deep=False, **kwargs):
    return kwargs

def other(args, **kwargs):
    return step(args, **kwargs)
