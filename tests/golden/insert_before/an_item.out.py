def train(samples):
    samples["rewards"]["all"] = samples["rewards"]["mean"]
    samples.update(ids())
    samples["rewards"]["mean"] = 0
