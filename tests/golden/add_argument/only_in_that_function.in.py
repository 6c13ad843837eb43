def evaluate(rows):
    return draw(rows)

def sample(rows):
    def inner():
        return draw(rows)
    return inner()
