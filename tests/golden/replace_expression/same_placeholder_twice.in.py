def train(a, b):
    return pair(a.x, b) + pair(a.x, a.x)
