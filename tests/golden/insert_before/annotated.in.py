def train(samples):
    batched: dict = dict(samples)
    return batched
