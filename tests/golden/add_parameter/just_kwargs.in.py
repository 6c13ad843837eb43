def step(**kwargs):
    return kwargs
