def sample(rows):
    x, y = draw(
        rows,
        3, 
        lean_rows=rows,
    )
    return x
