def step(lean_rows=None):
    return 1
