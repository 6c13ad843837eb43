def train(prompts, both):
    with cast(), torch.no_grad(), lean.rollout(
        rows=len(prompts), steps=3,
    ):
        if both:
            rewards, means = sample(prompts, both)
        else:
            rewards = sample(prompts)
