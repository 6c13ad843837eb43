def sample(rows):
    return draw(rows)
