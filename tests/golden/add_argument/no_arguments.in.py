def sample(rows):
    return draw()
