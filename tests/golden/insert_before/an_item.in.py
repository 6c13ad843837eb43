def train(samples):
    samples["rewards"]["all"] = samples["rewards"]["mean"]
    samples["rewards"]["mean"] = 0
