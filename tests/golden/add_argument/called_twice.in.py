def sample(rows):
    return draw(rows) + draw(rows)
