def step(a, b, /, lean_rows=None):
    return a
