def train(prompts, both):
    with cast(), torch.no_grad():
        if both:
            rewards, means = sample(prompts, both)
        else:
            rewards = sample(prompts)
