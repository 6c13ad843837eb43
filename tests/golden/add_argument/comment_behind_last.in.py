def sample(rows):
    return draw(
        rows,  # all of them
        3  # steps
        # and a line of its own
    )
