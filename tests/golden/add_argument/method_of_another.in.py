def sample(rows):
    return rows.draw(3)
