def sample(rows):
    return draw(lean_rows=rows)
