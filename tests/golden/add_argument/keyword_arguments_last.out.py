def sample(rows, **kw):
    return draw(
        rows, **kw, lean_rows=rows
    )
