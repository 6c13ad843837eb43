def train(samples):
    batched = 1
    batched = 2
    return batched
