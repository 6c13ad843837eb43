def sample(rows):
    return draw(rows,
                3)
