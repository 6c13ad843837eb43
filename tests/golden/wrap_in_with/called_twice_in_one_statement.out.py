def train(prompts):
    with lean.rollout(rows=1):
        x = sample(1) + sample(2)
    return x
