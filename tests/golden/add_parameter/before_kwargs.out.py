def step(args, *, deep=False, lean_rows=None, **kwargs):
    return kwargs

def other(args, **kwargs):
    return step(args, **kwargs)
