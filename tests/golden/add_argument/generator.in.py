def sample(rows):
    return draw(row for row in rows)
