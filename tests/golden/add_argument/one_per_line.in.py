def sample(rows):
    x, y = draw(
        rows,
        3, 
    )
    return x
