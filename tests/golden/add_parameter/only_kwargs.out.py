def step(args, lean_rows=None, **kwargs):
    return kwargs
