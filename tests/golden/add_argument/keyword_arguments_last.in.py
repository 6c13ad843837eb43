def sample(rows, **kw):
    return draw(
        rows, **kw
    )
