def train(samples):
    x = 1

    # lists of dicts

    batched = {
        k: v
        for k, v in samples.items()
    }
    return batched
