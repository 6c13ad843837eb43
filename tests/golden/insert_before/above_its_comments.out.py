def train(samples):
    x = 1
    samples.update(lean.identity())

    # lists of dicts

    batched = {
        k: v
        for k, v in samples.items()
    }
    return batched
