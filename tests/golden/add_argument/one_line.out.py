def sample(rows):
    return draw(rows, steps=3, lean_rows=rows)
