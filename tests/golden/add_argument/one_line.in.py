def sample(rows):
    return draw(rows, steps=3)
