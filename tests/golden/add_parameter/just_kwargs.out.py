def step(lean_rows=None, **kwargs):
    return kwargs
