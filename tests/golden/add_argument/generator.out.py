def sample(rows):
    return draw((row for row in rows), lean_rows=rows)
