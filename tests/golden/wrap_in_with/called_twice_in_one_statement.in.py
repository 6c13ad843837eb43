def train(prompts):
    x = sample(1) + sample(2)
    return x
