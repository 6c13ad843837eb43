def evaluate(rows):
    return draw(rows)

def sample(rows):
    def inner():
        return draw(rows, lean_rows=rows)
    return inner()
