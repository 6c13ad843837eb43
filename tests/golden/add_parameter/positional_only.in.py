def step(a, b, /):
    return a
