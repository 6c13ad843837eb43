def sample(rows):
    return draw(rows,
                3,
                lean_rows=rows)
