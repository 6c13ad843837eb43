def train(a, b):
    return pair(a.x, b) + one(a.x)
