def sample(rows):
    return draw(rows, lean_rows=rows["lean_row"][:, 0])
