def sample(rows):
    return draw(rows, lean_rows=None)
